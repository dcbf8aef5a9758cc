"""The listing of the decorator; the dots of its `nf.train` are filled in."""

import cadenza.compat.nemo as nemo
from cadenza.compat.nemo import logging
from digits import MyDataLayerNM, MyLossNM, MyNeuralNetworkNM, labels, nf, sklearn_as_it_was as sklearn, target

# Assume 'labels' is defined before this
inputs, targets = MyDataLayerNM()
predictions = MyNeuralNetworkNM(inputs=inputs)
loss = MyLossNM(inputs=inputs, targets=targets)

# Use the callback function decorator
@nemo.core.callbacks.on_step_end
# Define your function that accepts the input argument 'state'
def print_confusion_matrix(state):
    if state["step"] % 150 == 0:  # Log once every 150 steps
        # Use the get_tensor method of state["tensors"] to get the pytorch tensor associated with the
        # `target` NmTensor
        targets_value = state["tensors"].get_tensor(target)
        predictions_value = state["tensors"].get_tensor(predictions)
        confusion_matrix = sklearn.metrics.confusion_matrix(targets_value, predictions_value, labels)
        logging.info(confusion_matrix)

nf.train(callbacks=[print_confusion_matrix], tensors_to_optimize=[loss], optimizer="adam", optimization_params={"max_steps": 151, "lr": 0.01})  # Pass the function to the callbacks arg of train()
