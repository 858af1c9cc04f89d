"""The prefix cache of a simulated server: a radix tree over prompt ids, with locks and eviction of the least recent.

It counts KV tokens and holds no values. What a running request stands on is locked; the rest can be evicted, leaf by
leaf, as `RadixCache` does in SGLang. What a request generated stays in the pool after it has ended, as a leaf without
ids: it takes room until it is evicted, but no prompt is found in it (the real server would find one that repeats a
whole conversation).
"""

import heapq
import itertools
from collections.abc import Sequence


class Node:
    """A run of ids below `parent`; `ids` is empty for a finished answer, of which only the size is known."""

    __slots__ = ("children", "ids", "key", "locks", "parent", "tokens", "used_at")

    def __init__(self, parent: "Node | None", key: int, ids: Sequence[int], tokens: int) -> None:
        self.parent = parent
        self.key = key
        self.ids = ids
        self.tokens = tokens
        self.children: dict[int, Node] = {}
        self.locks = 0
        self.used_at = 0


class PrefixCache:
    """All prompts whose KV is in the pool; `tokens` in the tree, of which `locked_tokens` cannot be evicted."""

    def __init__(self) -> None:
        self.root = Node(None, 0, (), 0)
        self.tokens = 0
        self.locked_tokens = 0
        self._numbers = itertools.count(1)
        self._leaves: list[tuple[int, Node]] = []  # by last use; entries that no longer hold are passed over

    def match(self, ids: Sequence[int]) -> tuple[Node, int]:
        """The deepest node whose path is a prefix of `ids`, and how many ids that is."""
        node, matched = self.root, 0
        while matched < len(ids):
            child = node.children.get(ids[matched])
            if child is None:
                break
            common = _common(child.ids, ids, matched)
            if common < child.tokens:
                child = self._split(child, common)
            node = child
            matched += common
        return node, matched

    def insert(self, ids: Sequence[int]) -> Node:
        """The node whose path is `ids`; what is missing of it is added, unlocked: lock it at once."""
        node, matched = self.match(ids)
        if matched == len(ids):
            return node
        return self._add(node, ids[matched], ids[matched:], len(ids) - matched)

    def add_answer(self, node: Node, tokens: int) -> None:
        """Leave the KV of a finished answer below its prompt."""
        if tokens > 0:
            added = self._add(node, -next(self._numbers), (), tokens)
            self._touch(added)

    def lock(self, node: Node) -> None:
        """Keep a node and all above it."""
        while node.parent is not None:
            if node.locks == 0:
                self.locked_tokens += node.tokens
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        while node.parent is not None:
            node.locks -= 1
            if node.locks == 0:
                self.locked_tokens -= node.tokens
                self._touch(node)
            node = node.parent

    def evict(self, tokens: int) -> None:
        """Free at least so many tokens, if as many are unlocked; whole leaves go."""
        freed = 0
        while freed < tokens and self._leaves:
            used_at, node = heapq.heappop(self._leaves)
            if node.used_at != used_at or node.locks or node.children or node.parent is None:
                continue
            parent = node.parent
            del parent.children[node.key]
            node.parent = None
            freed += node.tokens
            self.tokens -= node.tokens
            if parent.parent is not None and not parent.locks and not parent.children:
                heapq.heappush(self._leaves, (parent.used_at, parent))

    def _add(self, parent: Node, key: int, ids: Sequence[int], tokens: int) -> Node:
        node = Node(parent, key, ids, tokens)
        parent.children[key] = node
        self.tokens += tokens
        return node

    def _touch(self, node: Node) -> None:
        # One number for each use, so that two entries never compare their nodes.
        node.used_at = next(self._numbers)
        heapq.heappush(self._leaves, (node.used_at, node))

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two; the lower one stays the same object, so that locks held on it stay right."""
        parent = node.parent
        assert parent is not None
        upper = Node(parent, node.key, node.ids[:at], at)
        upper.locks = node.locks
        # Its place in the order of eviction is decided when the lower one has gone.
        upper.used_at = next(self._numbers)
        parent.children[node.key] = upper
        node.parent, node.key, node.ids, node.tokens = upper, node.ids[at], node.ids[at:], node.tokens - at
        upper.children[node.key] = node
        return upper


def _common(run: Sequence[int], ids: Sequence[int], start: int) -> int:
    """How many ids of `run` stand in `ids` from `start` on."""
    if run == ids[start : start + len(run)]:
        return len(run)
    return next(n for n, token in enumerate(run) if start + n == len(ids) or ids[start + n] != token)
