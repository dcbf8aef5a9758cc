"""The listing of the built-in callbacks; the dots of its `nf.train` are filled in."""

from digits import MyLossModule, MyMetricModule, nf, predictions, targets
from cadenza.compat.nemo.core.callbacks import SimpleLogger, TensorboardLogger, WandBLogger

# Assuming that you have a network defined above that produces a predictions tensor and instantiated
# a MyLossModule and a MyMetricModule.
loss = MyLossModule(targets=targets, predictions=predictions)
precision, recall, F1 = MyMetricModule(targets=targets, predictions=predictions)

# If desired, users can assign a string name to tensors for easy reference in callbacks
precision.rename("p")
# Note that the name "loss" is reserved for the training loss

callbacks = [
    # Create a callback that prints the loss to screen every 10 steps
    # By default tensors_to_log is ["loss"], so there is no need to pass that
    SimpleLogger(step_freq=10),
    # Create the tensorboard callback by passing the Tensorboard SummaryWriter object, and telling it to log
    # loss and precision.
    TensorboardLogger(nf.tb_writer, tensors_to_log=["loss", "p"]),
    # Create the Weights and Biases callback by giving it a name and project, and tell it to log the loss, F1
    # and recall scores. Note that tensors_to_log also accepts the NmTensors themselves or their unique_names
    # in addition to any renaming that users do
    WandBLogger(wandb_name="my_exp", wandb_project="my_proj", tensors_to_log=[loss, F1, recall.unique_name])
]

nf.train(
    tensors_to_optimize=[loss],
    callbacks=callbacks,
    optimizer="adam",
    optimization_params={"num_epochs": 8, "lr": 0.01},
)
print("unique name of recall:", recall.unique_name)
