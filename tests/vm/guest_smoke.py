"""In the guest: this Python opens two pools that lie on persistent memory, and says what it finds.

A reader and a trainer must see the same, on a file with DAX and on a DAX device.
"""

import json
import sys
import time
from typing import Any


def look_at(path: str, device: str) -> dict[str, Any]:
    from trainingcxl.pool import Pool

    digests = []
    for read_only in (True, False):
        options: dict[str, Any] = {"read_only": True} if read_only else {"durability": "power"}
        with Pool(path, device=device, resume="latest", **options) as pool:
            digests.append(pool.digest())
            found = {
                "medium": pool.medium,
                "committed_batch": pool.committed_batch,
                "durable_batch": pool.durable_batch,
            }
    if digests[0] != digests[1]:
        raise AssertionError(f"a reader sees {digests[0]}, a trainer {digests[1]}")
    return found


def main(folder: str) -> dict[str, Any]:
    began = time.monotonic()
    from trainingcxl.pool import verify

    import_s = round(time.monotonic() - began)
    pools = [
        look_at(f"{folder}/nvdimm-ext4/test.pool", ""),
        look_at(f"{folder}/nvdimm-devdax/test.pool", "/dev/dax1.0"),
    ]
    if damages := verify(f"{folder}/nvdimm-ext4/test.pool"):
        raise AssertionError(f"damages {damages}")
    if [pool["medium"] for pool in pools] != ["fsdax", "devdax"]:
        raise AssertionError(f"media of {pools}")
    return {"pools": pools, "import_s": import_s}


if __name__ == "__main__":
    try:
        result = main(sys.argv[1])
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    print("@python result " + json.dumps(result), flush=True)
    sys.exit("error" in result)
