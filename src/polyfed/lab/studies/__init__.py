"""Studies: many runs that make a table or a figure, and what they prove."""
