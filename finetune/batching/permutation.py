"""Keyed permutations: position -> position, a pure function of the size and a few integers.

Up to `EXACT_LIMIT` positions the permutation is exact: every order has the same probability, and it
is held as an array. Above that it is a Feistel network (Luby and Rackoff, 1988) over the smallest
power of two that holds the size. The network is walked along its cycle until the position is back
inside (Black and Rogaway, 2002). It is bijective by construction, and computes any position in
constant expected time, without memory.

Both read only Philox words (Salmon et al., 2011) under a SHA-256 key. NumPy promises to keep the
words of its bit generators, but not the methods of its `Generator`, so orders survive an update of
NumPy.
"""

from __future__ import annotations

import hashlib

import numpy as np

EXACT_LIMIT = 1 << 20
MAX_SIZE = 1 << 62
FEISTEL_ROUNDS = 8


def random_words(count: int, *key: int) -> np.ndarray:
    """Uniform 64-bit words for a key of integers: uint64[count], the same on every machine and
    NumPy version.
    """
    text = "finetune/1:" + ",".join(str(int(part)) for part in key)
    digest = hashlib.sha256(text.encode("ascii")).digest()
    philox_key = np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)
    return np.random.Philox(key=philox_key).random_raw(count)


def exact_order(size: int, *key: int) -> np.ndarray:
    """Return a uniformly drawn order of 0..size-1: int64[size]. A stable sort, so that it is the
    same on every machine.
    """
    return np.argsort(random_words(size, *key), kind="stable")


class Permutation:
    """The permutation of 0..size-1 that belongs to the integers `key`, as a function of positions.

    `exact_limit` is the largest size that is held as an array; it changes the order, so runs keep
    the default.

    Raises:
        ValueError: size below 1 or above 2**62.
    """

    def __init__(self, size: int, *key: int, exact_limit: int = EXACT_LIMIT) -> None:
        if not 1 <= size <= MAX_SIZE:
            raise ValueError(f"size is {size}; a permutation needs 1 <= size <= 2**62")
        self.size = size
        self._table: np.ndarray | None = None
        if size <= exact_limit:
            self._table = exact_order(size, size, *key)
        else:
            self._round_keys = random_words(FEISTEL_ROUNDS, size, *key)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Map positions, int64[N], each in 0..size-1 (else ValueError), to int64[N]."""
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and (positions.min() < 0 or positions.max() >= self.size):
            raise ValueError(
                f"positions {positions.min()}..{positions.max()} are not all inside"
                f" 0..{self.size - 1}"
            )
        if self._table is not None:
            return self._table[positions]
        return self._walk(positions.astype(np.uint64)).astype(np.int64)

    def _walk(self, values: np.ndarray) -> np.ndarray:
        """Apply the network until every value is below `size`: under two times on average (domain <
        2 size).
        """
        # The network permutes the larger domain, so the cycle of a value below `size` leads back
        # below `size`, and no two values end at the same place.
        values = self._network(values)
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            walked = self._network(values.flat[outside])
            values.flat[outside] = walked
            outside = outside[walked >= self.size]
        return values

    def _network(self, values: np.ndarray) -> np.ndarray:
        """One pass: each round XORs one half with a keyed hash of the other, which the same XOR
        undoes.
        """
        bits = max(2, (self.size - 1).bit_length())
        low_bits = bits // 2
        low_mask = np.uint64((1 << low_bits) - 1)
        high_mask = np.uint64((1 << (bits - low_bits)) - 1)
        high = values >> np.uint64(low_bits)
        low = values & low_mask
        for number, round_key in enumerate(self._round_keys):
            if number % 2:
                low = low ^ (_mix(high ^ round_key) & low_mask)
            else:
                high = high ^ (_mix(low ^ round_key) & high_mask)
        return (high << np.uint64(low_bits)) | low


def _mix(words: np.ndarray) -> np.ndarray:
    """Apply the 64-bit finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every input bit
    reaches every output bit.
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
