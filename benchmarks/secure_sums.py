"""What secure sums cost: bytes and seconds of a round of one circle, by members and numbers in a copy.

    python benchmarks/secure_sums.py [--members 10 100] [--numbers 10000 100000] [--repeat 3]

One process does the work of all; a member's seconds are those of one of them, the server's those of adding up and
opening. With --leaving, that share of the members leaves after giving shares: the worst for the server. Medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from fedquilt.secure import SecureSums, shamir
from fedquilt.secure.protocol import Party, Sum


def measure(members: int, numbers: int, leaving: float, settings: SecureSums) -> dict[str, float]:
    """One round: seconds of a member and of the server, and bytes of a member each way."""
    point = settings.point(members)
    copies = point.encode(np.random.default_rng(0).normal(size=(members, numbers)))
    gone = set(range(round(leaving * members)))
    clock = {"member": 0.0, "server": 0.0}
    start = time.perf_counter()

    def took(whose: str) -> None:
        nonlocal start
        clock[whose] += time.perf_counter() - start
        start = time.perf_counter()

    parties = [Party(number, settings) for number in range(members)]
    keys = {number: party.keys() for number, party in enumerate(parties)}
    took("member")
    server = Sum(keys, settings)
    took("server")
    up = down = 0
    for number, party in enumerate(parties):
        peers = server.peers(number)
        took("server")
        shares = party.shares(peers, members)
        took("member")
        server.take_shares(number, shares)
        up += len(keys[number]) + sum(map(len, shares.values()))
        down += sum(map(len, peers.values()))
    for number, party in enumerate(parties):
        received = server.received(number)
        took("server")
        masked = party.masked(copies[number], received)
        took("member")
        if number not in gone:
            server.take_masked(number, masked)
        up += masked.nbytes
        down += sum(map(len, received.values()))
    for number in sorted(server.arrived):
        fates = server.fates(number)
        took("server")
        shares = parties[number].unmask(*fates)
        took("member")
        server.take_unmask(number, shares)
        up += shamir.SHARE * len(shares)
        down += 4 * len(shares)
    total = server.open()
    took("server")
    staying = [number for number in range(members) if number not in gone]
    assert np.array_equal(total, copies[staying].sum(0, dtype=copies.dtype))
    return {
        "member_s": clock["member"] / members,
        "server_s": clock["server"],
        "up": up / members,
        "down": down / members,
        "neighbours": len(server.graph[0]),
    }


def main() -> None:
    """A line for each size."""
    parser = argparse.ArgumentParser(description="What secure sums cost.")
    parser.add_argument("--members", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--numbers", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--leaving", type=float, nargs="+", default=[0.0, 0.1])
    parser.add_argument("--bits", type=int, nargs="+", default=[64, 32])
    parser.add_argument("--repeat", type=int, default=3)
    told = parser.parse_args()
    print("members neighbours numbers bits leaving | member ms  server ms | member up  times open  member down beside")
    for members in told.members:
        for numbers in told.numbers:
            for bits in told.bits:
                for leaving in told.leaving:
                    settings = SecureSums(bits=bits, range=2.0**20 if bits == 64 else 64.0)
                    rounds = [measure(members, numbers, leaving, settings) for _ in range(told.repeat)]
                    found = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
                    print(
                        f"{members:>7} {found['neighbours']:>10.0f} {numbers:>7} {bits:>4} {leaving:>7.0%} | "
                        f"{1000 * found['member_s']:>9.1f} {1000 * found['server_s']:>10.1f} | "
                        f"{found['up']:>9.0f} {found['up'] / (4 * numbers):>11.2f} {found['down']:>19.0f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
