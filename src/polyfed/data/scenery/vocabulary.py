"""The words and sentence patterns of captions and texts."""

from __future__ import annotations

SHAPE_WORDS = {
    "circle": ("circle", "circle", "disc", "round shape"),
    "square": ("square", "square", "box", "block"),
    "triangle": ("triangle", "triangle", "wedge", "three-sided shape"),
    "star": ("star", "star", "five-pointed star", "pointed shape"),
    "cross": ("cross", "cross", "plus", "plus sign"),
    "ring": ("ring", "ring", "hoop", "donut"),
}
COLOUR_WORDS = {
    "red": ("red", "red", "crimson"),
    "orange": ("orange", "orange", "amber"),
    "yellow": ("yellow", "yellow", "golden"),
    "green": ("green", "green", "emerald"),
    "teal": ("teal", "turquoise", "cyan"),
    "blue": ("blue", "blue", "azure"),
    "purple": ("purple", "purple", "violet"),
    "pink": ("pink", "pink", "rosy"),
}
SIZE_WORDS = {
    "small": ("small", "little", "tiny"),
    "medium": ("medium", "mid-sized", "middling"),
    "large": ("large", "big", "huge"),
}
TEXTURE_WORDS = {
    "plain": ("", "plain", "solid"),
    "striped": ("striped", "with stripes", "lined"),
    "dotted": ("dotted", "with dots", "spotted"),
}
RELATION_WORDS = {
    "left": ("to the left of", "left of", "on the left side of"),
    "right": ("to the right of", "right of", "on the right side of"),
    "above": ("above", "over", "higher than"),
    "below": ("below", "under", "beneath"),
}
PLACE_WORDS = {
    "left": ("on the left", "at the left edge"),
    "right": ("on the right", "at the right edge"),
    "top": ("at the top", "in the upper part"),
    "bottom": ("at the bottom", "in the lower part"),
    "middle": ("in the middle", "near the centre"),
}
NUMBERS = ("no", "one", "two", "three", "four", "five")

PAIR = (
    "{a} {r} {b}",
    "{a} is {r} {b}",
    "there is {a} {r} {b}",
    "a picture of {a} {r} {b}",
    "someone put {a} {r} {b}",
    "next to {b} , {r} it , lies {a}",
)
BOTH = ("{a} and {b}", "{a} together with {b}", "an image that shows {a} and {b}")
ALONE = ("{a}", "{a} {place}", "there is {a} {place} of the picture")
CROWD = ("{n} shapes , one of them {a}", "{a} among {n} shapes", "{n} things such as {a} and {b}")

TOPICS = ("art", "game", "lesson", "market", "nature", "traffic")
CUES = {
    "art": ("painting", "gallery", "canvas", "museum", "sculpture", "brush", "collage", "artist"),
    "game": ("puzzle", "player", "board", "token", "dice", "level", "score", "match"),
    "lesson": ("teacher", "exercise", "geometry", "pupil", "school", "homework", "proof", "exam"),
    "market": ("price", "shop", "sale", "customer", "label", "stall", "discount", "goods"),
    "nature": ("garden", "flower", "river", "leaf", "meadow", "bird", "forest", "shore"),
    "traffic": ("road", "driver", "signal", "crossing", "lorry", "lane", "station", "bicycle"),
}
FRAMES = (
    "this comes from the {cue} and has {a}",
    "the {cue} made me think of {a}",
    "you could say {cue} when you look at {a}",
    "{a} was found by the {cue}",
    "for the {cue} we need {a}",
    "they talked about the {cue} and then about {a}",
    "between {a} and the {cue} there is no room",
    "{a} looks like part of the {cue}",
)
