"""A permutation of the rows of a source, computed for one of them at a time: nothing is held for the others.

A Feistel network permutes a rectangle of `a * b >= size` numbers, and a number that lands beyond `size` is permuted
again until it does not: the generalized Feistel network and the cycle walk of J. Black and P. Rogaway, "Ciphers with
Arbitrary Finite Domains", CT-RSA 2002. The rectangle has less than one column more than `size` fills, so that walks are
rare. The round function is BLAKE2b keyed by the seed, so that the permutation is the same on every machine.
"""

from hashlib import blake2b
from math import isqrt

# Four make it hard to tell from a random permutation where the domain is large (Luby and Rackoff, 1988); small domains
# need more. NIST's FF3 has eight.
_ROUNDS = 8


class Permutation:
    """A bijection of [0, size) on itself, another one for each seed."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._a = isqrt(max(0, size - 1)) + 1
        self._b = -(-size // self._a)
        self._keyed = blake2b(digest_size=8, key=seed.to_bytes(32, "little", signed=True))

    def __getitem__(self, step: int) -> int:
        """Where `step` is sent; raises IndexError beyond the size."""
        if not 0 <= step < self._size:
            raise IndexError(f"{step} is not within 0 to {self._size - 1}")
        at = self._permuted(step)
        while at >= self._size:
            at = self._permuted(at)
        return at

    def _permuted(self, number: int) -> int:
        right, left = divmod(number, self._a)
        sizes = (self._a, self._b)  # of `left` before each round
        for number_of_round in range(_ROUNDS):
            mixer = self._keyed.copy()
            mixer.update(b"%d %d" % (number_of_round, right))
            mixed = int.from_bytes(mixer.digest(), "little")
            left, right = right, (left + mixed) % sizes[number_of_round % 2]
        return self._a * right + left
