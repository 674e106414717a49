"""One rank of the relay on GPUs of `test_trainer_pipeline`, under torchrun: what it found goes to a file."""

import os
import sys
from pathlib import Path

import torch
from test_trainer_pipeline import RELAY_OF_TWO, relay

directory = Path(sys.argv[1])
found = relay(RELAY_OF_TWO, directory / "relay", "cuda")
torch.save(found, directory / f"{os.environ['RANK']}.pt")
