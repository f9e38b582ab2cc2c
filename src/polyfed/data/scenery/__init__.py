"""The generator behind the source ``scenes``: contents, pictures, words and questions of a scene."""
