"""In the guest: this Python opens a pool that lies on persistent memory, and says what it finds."""

import json
import sys
import time


def main() -> int:
    began = time.monotonic()
    try:
        from trainingcxl.pool import Pool, verify

        imported = time.monotonic()
        with Pool(sys.argv[1], durability="power", resume="latest") as pool:
            found = {
                "medium": pool.medium,
                "committed_batch": pool.committed_batch,
                "durable_batch": pool.durable_batch,
                "tables": {name: list(table.weight.shape) for name, table in pool.tables.items()},
                "digest": pool.digest(),
            }
        damages = [str(damage) for damage in verify(sys.argv[1])]
        if damages or found["medium"] != "fsdax":
            found["error"] = f"medium {found['medium']}, damages {damages}"
        found["import_s"] = round(imported - began)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    print("@python result " + json.dumps(found), flush=True)
    return int("error" in found)


if __name__ == "__main__":
    sys.exit(main())
