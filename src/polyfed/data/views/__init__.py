"""How a modality is presented to its encoder; one view a module."""
