"""Run `soak` with the options after the number of a signal, which rank 1 gets in round 50: `interrupted_soak.py 2 --minutes 60`."""

import os
import sys

from mpi4py import MPI

from deepep_rt.cli.app import run
from deepep_rt.soak.runner import Run

one_round = Run._round


def interrupted_round(self, session, number):
    if number == 50 and MPI.COMM_WORLD.rank == 1:
        os.kill(os.getpid(), int(sys.argv[1]))
    one_round(self, session, number)


Run._round = interrupted_round
run(["soak", *sys.argv[2:]])
