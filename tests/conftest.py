"""What all tests rely on: one thread, and a Ctrl-C that arrives."""

import signal

import torch

torch.set_num_threads(1)  # the machines that run these tests have few cores, and sums must not depend on their number

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts its background jobs so, and children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
