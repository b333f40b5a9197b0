"""Training and forecasting: everything that knows Lightning, Hydra and checkpoints."""
