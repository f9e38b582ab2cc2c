"""Parts that methods share: bases and collaborators, none of which is a method."""
