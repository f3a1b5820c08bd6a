"""Objects: everything in a state that is not a tensor, as typed, lossless JSON; never a pickle.

Plain JSON values stay plain. What JSON has no word for is an object with one key that begins with ``$``::

    {"$tensor": "model.weight"}            a tensor of the index          {"$int": "123…"}       an int beyond ±2**53
    {"$tuple": [1, 2]}                     a tuple                        {"$float": "nan"}      nan, inf, -inf, nan:<bits>
    {"$dict": [[0, "a"], [[1], "b"]]}      a dict with other keys         {"$complex": [re, im]} a complex
    {"$ordered_dict": [["a", 1]]}          a collections.OrderedDict      {"$bytes": "<base64>"} bytes; $bytearray likewise
    {"$set": [1, 2]}                       a set; $frozenset likewise     {"$str": "<base64>"}   a str with lone surrogates
    {"$array": {"dtype", "shape", "order", "data"}}  a numpy array        {"$scalar": {"dtype", "data"}}  a numpy scalar
    {"$dtype": "<f4"}                      a numpy dtype                  {"$range": [0, 9, 1]}  a range

A codec's tag stands there likewise: ``{"$torch.dtype": "bfloat16"}``. Types are exact: a subclass (a namedtuple, an IntEnum, a
defaultdict) is refused unless a codec is registered for it, and so are datetime, Path, Decimal and all other classes. A value that
occurs twice is stored twice. Dicts keep their order.
"""

from __future__ import annotations

from tierstore.format.objects_codecs import ObjectCodecs, Opaque, TensorRef
from tierstore.format.objects_decode import decode_objects
from tierstore.format.objects_document import ObjectsDocument, load_objects, merge_objects, object_ranks, split_objects
from tierstore.format.objects_encode import encode_objects

__all__ = [
    "ObjectCodecs",
    "ObjectsDocument",
    "Opaque",
    "TensorRef",
    "decode_objects",
    "encode_objects",
    "load_objects",
    "merge_objects",
    "object_ranks",
    "split_objects",
]
