"""A communicator for tests of one rank."""

from __future__ import annotations


class FakeRanks:
    """The communicator of one rank, without the other ranks.

    Args:
        size: The number of ranks.
        rank: This rank.
        hosts: The ranks of each host. Default: all ranks are on one host.
        gather: Returns the values of all ranks for an allgather, given the value of this one. Default: all values are the same.
    """

    def __init__(self, size=4, rank=0, hosts=None, gather=None):
        self.size, self.rank, self.hosts = size, rank, hosts or [list(range(size))]
        self.gather = gather or (lambda mine: [mine] * size)

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.size

    def Dup(self):
        return self

    def meet(self, timeout_s, phase, hint):
        return self

    def release(self):
        pass

    def Free(self):
        pass

    def Bcast(self, array, root):
        pass

    def dup_for_process(self):
        return self

    @property
    def numbers(self):
        return range(self.size)

    outlives_owner = True
    relay_objection = ""
    heard = None

    def sub_comm(self, ranks):
        return FakeRanks(len(ranks), ranks.index(self.rank))

    def abandon(self):
        pass

    def ranks_on_host(self):
        return next(ranks for ranks in self.hosts if self.rank in ranks)

    def allgather(self, mine):
        return self.gather(mine)
