"""A LightningModule as the arguments of a native trainer. `Trainer.from_lightning` is the entry."""
