"""How trained weights become new global models."""
