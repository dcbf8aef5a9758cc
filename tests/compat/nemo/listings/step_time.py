"""The listing of a class; the dots of its `nf.train` are filled in, and the instance is kept to see what it found."""

import time

import cadenza.compat.nemo as nemo
from cadenza.hooks.dispatch import hooks_of
from digits import MyDataLayerNM, MyLossNM, nf

class StepTimeTracker(nemo.core.callbacks.NeMoCallback):
    def __init__(self, decay=0.99):
        self._decay = decay
        self._ema_step_time = 0
        self._step_start_time = 0

    # Note that even you do not use state, your functions must accept 1 positional argument
    def on_step_start(self, state):
        # Store current starting time in `self._step_start_time`
        self._step_start_time = time.time()

    def on_step_end(self, state):
        # Calculate step duration
        step_duration = time.time() - self._step_start_time

        # Apply exponential moving average
        self._ema_step_time = self._decay * self._ema_step_time + (1 - self._decay) * step_duration

inputs, targets = MyDataLayerNM()
loss = MyLossNM(inputs=inputs, targets=targets)
nf.train(callbacks=[StepTimeTracker()], tensors_to_optimize=[loss], optimization_params={"max_steps": 20, "lr": 0.01})  # Pass your callback class to train()

print("mean step time", hooks_of(nf.run).callbacks["StepTimeTracker"]._ema_step_time)
