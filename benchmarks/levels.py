"""What the benchmarks of durability share: their options."""

import argparse
from pathlib import Path

import torch

__all__ = ["parse_options"]


def parse_options(what: str, folder: str) -> argparse.Namespace:
    """Reads the command line, and gives torch its threads.

    Args:
        what: The benchmark, in a line.
        folder: What FOLDER is for.
    """
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("folder", type=Path, help=folder)
    parser.add_argument("--shape", default="iii16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    return args
