"""Writes synthetic_vectors.json anew: run it only after a deliberate change of the recipe."""

import json
from pathlib import Path

import numpy as np

from trainingcxl.data import parse_spec
from trainingcxl.data.synthetic import SyntheticGenerator

SPECS = ["tiny", "small?seed=7", "kaggle", "small?rho=0.7", "tiny?multi_hot=1&samples=9", "rm3"]
SAMPLES = [0, 1, 65535, 65536, (1 << 40) + 3]


def vector(spec: str) -> dict[str, object]:
    """Compute one entry of the file; floats in hexadecimal, so that every bit is written."""
    rows = SyntheticGenerator(parse_spec(spec), native=False).generate(np.array(SAMPLES))
    return {
        "spec": spec,
        "samples": SAMPLES,
        "dense": [[float(value).hex() for value in row] for row in rows.dense],
        "ids": rows.ids.tolist(),
        "label": rows.label.tolist(),
        "score": [float(value).hex() for value in rows.score],
    }


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(vector(spec)) for spec in SPECS)
    Path(__file__).with_name("synthetic_vectors.json").write_text(f"[\n{lines}\n]\n")
