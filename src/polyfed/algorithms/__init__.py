"""Methods: one class a file, server half and client half side by side."""
