"""Pure losses and the few small modules with learnable scalars; they know tensors, not clients or tasks."""
