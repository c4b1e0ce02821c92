"""Messages of a distributed run: numbers and arrays, and nothing that runs."""

import pickle

import chex
import numpy as np
import pytest

from radazo_jax._src.workers.messages import Reply, Request, decode, encode, failed

_MESSAGES = [
    Request(
        *(3, 7, np.array([[1.5, np.nan], [-np.inf, -0.0]])),
        *(np.array([1, 2**32 - 1], np.uint32), np.arange(3), True),
    ),
    Request(2**70, 0, np.zeros((0, 4), np.float32), np.zeros(0, np.uint32), np.ones(1)),
    Reply(
        *(np.int64(5), 9, (1, 2, 3), np.float32(0.1)),
        *(np.ones((2, 3), np.float32), np.array([1e-45, 2], np.float32)),
    ),
    failed('"Δ"\n\udc80'),
]


@pytest.mark.parametrize("message", _MESSAGES)
def test_a_message_arrives_to_the_bit(message):
    found = decode(memoryview(encode(message)))
    assert type(found) is type(message)
    for x, y in zip(found, message, strict=True):
        if isinstance(y, np.ndarray):
            chex.assert_trees_all_equal_shapes_and_dtypes(x, y)
            assert x.tobytes() == y.tobytes() and x.flags.writeable
        else:
            assert x == y


class Runs:
    def __reduce__(self):
        return pytest.fail, ("a peer's bytes were run",)


@pytest.mark.parametrize(
    "sent",
    [
        pickle.dumps(Runs()),
        b"",
        b'["Runs", {}]\n',
        b'["Reply", {"step": 0}]\n',
        encode(_MESSAGES[0])[:-1],
        encode(_MESSAGES[0]) + b"0",
        encode(_MESSAGES[0]).replace(b"<f8", b"|O8"),
    ],
)
def test_other_bytes_are_refused(sent):
    with pytest.raises(ValueError, match="message must"):
        decode(sent)
