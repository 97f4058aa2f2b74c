"""List the findings of doctor with meaning and remedy. `.ci/doctor_page.py` writes a section of the documentation for each."""

from __future__ import annotations

from dataclasses import dataclass

from .._install import pip_install, pip_install_cuda

MIN_NVSHMEM = "3.4.5"
"""The oldest NVSHMEM that pyproject.toml accepts."""

MIN_SHM_BYTES = 128 << 20
MIN_MEMLOCK_BYTES = 1 << 30


@dataclass(frozen=True)
class FindingType:
    """A type of finding."""

    name: str  # the printed name, and the heading of its section in the documentation
    meaning: str  # the consequences
    remedy: str  # the steps that remove the cause


_ALL = (
    # --- MPI
    FindingType(
        "no-mpi4py",
        "Buffers need an mpi4py communicator, on GPUs too. Only Buffers of a torch.distributed group need none. mpi4py is "
        "not installed, or it finds no MPI library.",
        f"{pip_install('mpich')} brings an MPI and its mpirun. With an MPI of your own, put its library where the "
        "loader finds it (module load, LD_LIBRARY_PATH), or build mpi4py for it: pip install --no-binary mpi4py mpi4py.",
    ),
    FindingType(
        "no-mpirun",
        "There is no mpirun on the PATH, so you cannot start more than one rank.",
        f"Activate the environment that holds it, call it by its path, or {pip_install('mpich')}. Under Slurm, "
        "srun can start the ranks too.",
    ),
    FindingType(
        "wrong-mpirun",
        "The launcher belongs to one MPI, and mpi4py uses another. MPI then ends with an error about PMI or PMIx, or each "
        "process believes that it is rank 0 of 1. In the second case programs seem to work, but every rank computes "
        "alone.",
        "Start with the mpirun of the MPI that mpi4py uses; pip puts it next to this python. Or install mpi4py for the "
        "MPI that you start with, with its mpicc on the PATH: pip install --force-reinstall --no-binary mpi4py mpi4py.",
    ),
    FindingType(
        "other-launcher",
        "torchrun, or another launcher that is not MPI's, started the processes. To MPI each is rank 0 of 1. A program "
        "that gives a Buffer MPI.COMM_WORLD seems to work, but every process computes alone. Such a job has no relay over MPI, so "
        "on several hosts it needs NVSHMEM and a NIC, or NIXL.",
        "With PyTorch, give the Buffer deepep_rt.torch.communicator(), which needs no MPI. Otherwise start with mpirun "
        "(or srun), one process for each GPU. If this is the only process, unset WORLD_SIZE.",
    ),
    FindingType(
        "mpi-does-not-start",
        "There is an MPI, but MPI_Init failed or hung, or ranks are missing. You cannot make a Buffer.",
        "The message is MPI's own. Common causes are a mpirun of another MPI, a full or tiny /dev/shm, hosts that cannot "
        "reach each other, and a network interface that MPI should not use. Choose another interface with --mca "
        "btl_tcp_if_include (Open MPI) or with FI_PROVIDER=tcp or FI_TCP_IFACE (MPICH). As root, Open MPI starts only "
        "with OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1. Without mpirun, on a machine without ssh, "
        "Open MPI 4 starts only with OMPI_MCA_plm=isolated.",
    ),
    # --- GPUs
    FindingType(
        "no-gpu",
        "This process found no NVIDIA GPU. With backend='auto', Buffers run on the host backend (NumPy and MPI), which "
        "gives the same results far more slowly. With backend='cuda', making one raises EPUnavailableError.",
        "On a machine that has GPUs, install NVIDIA's driver. In a container, pass the GPUs in (docker run --gpus all). "
        "If you want no GPUs, choose backend='auto' (the default) or 'host'.",
    ),
    FindingType(
        "gpu-hidden",
        "The machine has GPUs, but this process sees none of them. With backend='auto', Buffers run on the host backend. "
        "With backend='cuda', making one raises EPUnavailableError.",
        "Unset CUDA_VISIBLE_DEVICES, or set it to GPUs that exist. In a container, pass the GPUs in (docker run --gpus "
        "all). Under Slurm, ask for them (--gpus-per-node).",
    ),
    FindingType(
        "neighbours-hidden",
        "A rank sees only its own GPU, or not those of all other ranks of its host. Virtual memory of CUDA, the default, works so. "
        "Memory of NVSHMEM does only if NVML says that the GPUs reach each other. If it does not, making a Buffer raises "
        "EPUnavailableError. Containers that hold one GPU each are an example.",
        "Unset DEEPEP_RT_SYMMETRIC_MEMORY. Or give all ranks of a host the same CUDA_VISIBLE_DEVICES, or none. Each then takes "
        "the GPU with its own number on the host, unless the program chooses another one. Under Slurm leave out --gpus-per-task "
        "and --gpu-bind. Under Ray set RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1.",
    ),
    FindingType(
        "no-virtual-memory",
        "Processes cannot share virtual memory of a GPU. Buffers take the memory of NVSHMEM instead, and their groups, sleep and growth "
        "are limited. With DEEPEP_RT_SYMMETRIC_MEMORY=heap, making a Buffer raises EPUnavailableError.",
        "If a descriptor cannot be passed, let the sandbox (seccomp) allow Unix sockets. If the driver refuses, install a newer "
        "one. Or set DEEPEP_RT_SYMMETRIC_MEMORY=nvshmem.",
    ),
    FindingType(
        "driver-fails",
        "There is an NVIDIA driver, but CUDA does not start. CUDA_ERROR_SYSTEM_NOT_READY means that the fabric manager of "
        "a machine with NVSwitch does not run. CUDA_ERROR_SYSTEM_DRIVER_MISMATCH means that the machine was not restarted "
        "after an update of the driver, or that a container brings a libcuda of its own. CUDA_ERROR_UNKNOWN often means "
        "that the module nvidia_uvm is missing.",
        "Look at nvidia-smi and dmesg. Then, as administrator, do one of these: systemctl start nvidia-fabricmanager (in "
        "the version of the driver), restart the machine after an update of the driver, or modprobe nvidia_uvm.",
    ),
    FindingType(
        "gpu-lost",
        "The driver counts a GPU that it cannot reach. Often the GPU fell off the bus (Xid 79 in dmesg).",
        "Reset the GPU or restart the machine, as administrator. If it happens again, suspect the hardware.",
    ),
    FindingType(
        "driver-too-old",
        "NVRTC belongs to a newer CUDA than the driver. Kernels compile, but the driver cannot load them.",
        f"Install the CUDA libraries for the driver ({pip_install('cuda12')} instead of cuda13), or a newer driver.",
    ),
    FindingType(
        "gpu-too-old",
        "A GPU is older than sm_80 (A100), the oldest that the kernels support.",
        "Leave it out with CUDA_VISIBLE_DEVICES, or use backend='host'.",
    ),
    FindingType(
        "compiler-too-old",
        "NVRTC does not know the architecture of a GPU, so it cannot compile its kernels.",
        "Install a newer NVRTC: pip install --upgrade nvidia-cuda-nvrtc-cu12, or nvidia-cuda-nvrtc for CUDA 13.",
    ),
    FindingType(
        "mig",
        "MIG divides a GPU. Its parts can reach neither each other's memory nor other GPUs, so only a Buffer of one rank works.",
        "Turn MIG off for GPUs that run deepep_rt (nvidia-smi -mig 0, as administrator).",
    ),
    FindingType(
        "no-peer-access",
        "GPUs of one host cannot map each other's memory. Ranks on these GPUs cannot share a Buffer, except in different "
        "groups of ranks_per_node, through NVSHMEM.",
        "A virtual machine, PCIe ACS or IOMMU may disable peer access: ask the administrator. Or choose GPUs that reach "
        "each other with CUDA_VISIBLE_DEVICES.",
    ),
    FindingType(
        "no-nvlink",
        "GPUs reach each other over PCIe only. Everything works, at a fraction of the speed of NVLink.",
        "If NVLink connects other GPUs, choose them with CUDA_VISIBLE_DEVICES. If NVLink should be there, look at "
        "nvidia-smi nvlink --status and at the fabric manager's log.",
    ),
    FindingType(
        "nvlink-uneven",
        "GPUs of one model have different numbers of active NVLinks, so some links are down. All ranks wait for the slowest one.",
        "nvidia-smi nvlink --status shows which. Reset the GPU or restart the machine, as administrator. A link that "
        "stays down is a fault of the hardware.",
    ),
    FindingType(
        "shared-gpu",
        "Several ranks would use one GPU. Kernels of one then wait for kernels of the other, which do not run, so Buffer "
        "refuses it. DEEPEP_RT_SHARE_GPUS=1 lets ranks take turns: right results, very slowly, or at once under NVIDIA's "
        "MPS.",
        "Start at most as many ranks on a host as it has GPUs. Give no rank a CUDA_VISIBLE_DEVICES that names the GPU of "
        "another one.",
    ),
    FindingType(
        "gpus-on-some-ranks",
        "Some ranks see a GPU and others see none. Buffer(backend='auto') refuses that.",
        "Give every rank a GPU, or choose backend='host' on all of them.",
    ),
    FindingType(
        "uneven-hosts",
        "The ranks are not placed evenly. Ranks of one host must follow each other, and every host must hold the same "
        "number of them. NVLink connects at most 8 in a Buffer.",
        "Place ranks host by host. With 8 a host, use mpirun --map-by ppr:8:node (Open MPI), mpirun -ppn 8 (MPICH) or "
        "srun --ntasks-per-node=8 --distribution=block (Slurm).",
    ),
    FindingType(
        "not-enough-memory",
        "A Buffer of these sizes takes more memory than a GPU has free. Making it raises EPOutOfMemoryError.",
        "End other processes on the GPU (nvidia-smi shows them), limit the memory that a framework takes in advance "
        "(XLA_PYTHON_CLIENT_MEM_FRACTION for JAX), or lower num_max_tokens_per_rank or num_slots.",
    ),
    FindingType(
        "wrong-sizes",
        "A Buffer cannot have these sizes, so doctor cannot tell its memory.",
        "Give doctor the sizes that the program uses: --tokens, --hidden, --topk, --experts, --dtype, --slots, --ranks.",
    ),
    # --- libraries
    FindingType(
        "no-cuda-packages",
        "A CUDA library or its Python binding does not load. The CUDA backend needs all of them. The host backend needs none.",
        f"{pip_install_cuda()}.",
    ),
    FindingType(
        "mixed-cuda-packages",
        "Packages for different CUDA versions are installed together. They may overwrite each other's files.",
        "Make a new environment, and install only the extra cuda12 or only cuda13, and frameworks for the same CUDA.",
    ),
    FindingType(
        "no-nvshmem",
        "NVSHMEM or nvshmem4py is missing or does not load. Buffers need it for the network of NVSHMEM between hosts. Inside a host "
        "they need it only where virtual memory of CUDA cannot be shared, or with DEEPEP_RT_SYMMETRIC_MEMORY=nvshmem.",
        f"{pip_install_cuda()}. If it is installed, the message names the library that it misses.",
    ),
    FindingType(
        "nvshmem-too-old",
        "NVSHMEM is older than 3.4.5. Its device library does not link with code from NVRTC.",
        "pip install --upgrade nvidia-nvshmem-cu12 (or -cu13). If the loader finds another NVSHMEM first, remove it from "
        "LD_LIBRARY_PATH and from the module environment.",
    ),
    FindingType(
        "nvshmem-mismatch",
        "Kernels would link the device library of one NVSHMEM and run with the host library of another. Both must have "
        "the same version.",
        "Keep one NVSHMEM. Remove others from LD_LIBRARY_PATH, CUDA_HOME and the module environment, or reinstall "
        "nvidia-nvshmem-cu12 (or -cu13). Then run python -m deepep_rt cache clear.",
    ),
    # --- network
    FindingType(
        "no-transport",
        "No transport, or not the one that --transport asks for, can carry rows between the nodes. Making a Buffer raises "
        "EPUnavailableError. NVSHMEM needs a NIC on every host. A relay needs MPI with MPI_THREAD_MULTIPLE, which jobs "
        "that torchrun started lack, or NIXL on every host.",
        "Install nixl-cu12 (nixl-cu13 with CUDA 13) on every host. Or start the job with mpirun or srun, leave out settings "
        "that lower MPI's threads (mpi4py.rc.thread_level, MPI4PY_RC_THREAD_LEVEL), and take an MPI that was built with "
        "threads. Or choose hosts with RDMA NICs.",
    ),
    FindingType(
        "no-nic",
        "The ranks are on several hosts, and NVSHMEM's default transport finds no NIC on a host: none is there, none is "
        "active, or this user may not open it. With transport='auto', a Buffer takes a relay over NIXL or MPI, which is slower.",
        "Look at ibstat or ibv_devinfo. In a container, pass /dev/infiniband in. On a cloud, choose machines with RDMA "
        "(InfiniBand, RoCE, EFA) and NVSHMEM_REMOTE_TRANSPORT to match; docs/several-nodes.md has the list. If there is no "
        "such NIC, measure what the relay gets with doctor --network.",
    ),
    FindingType(
        "no-mpi-threads",
        "MPI does not grant MPI_THREAD_MULTIPLE. Neither NVSHMEM nor NIXL needs threads of MPI, so this job works. The relay "
        "over MPI (NetworkOptions(transport='mpi')) would not.",
        "Nothing, unless you want that relay. Then leave out settings that lower MPI's threads (mpi4py.rc.thread_level, "
        "MPI4PY_RC_THREAD_LEVEL), or take an MPI that was built with threads.",
    ),
    FindingType(
        "nic-down",
        "Ports of RDMA NICs are not active. The ranks of the GPUs next to them use another NIC, and share its bandwidth.",
        "If the port should be active, look at its cable, the switch and the subnet manager (ibstat). Otherwise do nothing.",
    ),
    FindingType(
        "no-gpudirect",
        "NICs may not be able to reach GPU memory. Neither the module nvidia-peermem is loaded, nor a driver with open "
        "kernel modules, which has DMA-BUF.",
        "As administrator, run modprobe nvidia-peermem, or install the driver with its open kernel modules.",
    ),
    FindingType(
        "ibgda-parameters",
        "The NVIDIA driver runs without the parameters that IBGDA needs for GPUs to ring a NIC's doorbell. NVSHMEM then "
        "lets the CPU ring it, which is slower.",
        'Put options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="PeerMappingOverride=1;" into '
        "/etc/modprobe.d/nvidia.conf, as administrator, and restart the machine. docs/several-nodes.md says more.",
    ),
    FindingType(
        "no-gdrcopy",
        "GDRCopy is not complete (module gdrdrv and library libgdrapi). NVSHMEM's proxy transports use it for atomic "
        "operations. IBGDA uses it for a doorbell that the CPU rings.",
        "Install both parts of GDRCopy (github.com/NVIDIA/gdrcopy). In a container, pass /dev/gdrdrv in.",
    ),
    FindingType(
        "memlock",
        "The limit on locked memory is low. RDMA locks the memory that it registers, and fails at this limit.",
        "Raise the limit: ulimit -l unlimited in a shell, PropagateResourceLimitsExcept=MEMLOCK in Slurm, --ulimit "
        "memlock=-1 in a container.",
    ),
    FindingType(
        "own-name-is-local",
        "A host's own name resolves to an address of the host itself, such as 127.0.1.1. A launcher or a library that sends "
        "this address to other hosts makes them look for the rank on their own host.",
        "Give the host's name its network address in /etc/hosts or in the name service. Or name the interface: "
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME for NVSHMEM, --mca btl_tcp_if_include (Open MPI), HYDRA_IFACE and FI_TCP_IFACE "
        "(MPICH).",
    ),
    FindingType(
        "different-subnets",
        "Two hosts have no subnet in common, so they reach each other only through a router. Some transports connect only "
        "addresses of one subnet, and MPI or NVSHMEM then hangs at its start.",
        "If programs on these hosts run, do nothing. Otherwise choose hosts of one network, or name an interface that leads "
        "to all of them (btl_tcp_if_include, FI_TCP_IFACE, NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME).",
    ),
    FindingType(
        "network-stuck",
        "doctor --network began to measure between ranks and did not end. MPI connects two ranks when they first send to "
        "each other, so addresses that do not reach each other show only then. Processes of torchrun meet in the store of "
        "torch.distributed.",
        "The message names the ranks. Check firewalls between their hosts, and name the interface that connects them: --mca "
        "btl_tcp_if_include (Open MPI), FI_TCP_IFACE (MPICH), UCX_NET_DEVICES (NIXL). Processes of another job on the same "
        "processors can also make it slow.",
    ),
    FindingType(
        "gpus-not-measured",
        "doctor --network could not make a Buffer on the GPUs, so rates between GPUs are missing. Programs will probably not "
        "make one either.",
        "The message is that of the Buffer. Other findings often say more.",
    ),
    FindingType(
        "relay-not-measured",
        "doctor --network could not start a relay over NIXL between two nodes. A Buffer with this transport will probably not "
        "start one either.",
        "The message is that of the relay. It says which rank cannot use NIXL, or does not reach which other one.",
    ),
    FindingType(
        "slow-network",
        "Large messages between ranks are slower than half of what this kind of link usually reaches. MPI may use another "
        "network than the fastest one, for example TCP instead of InfiniBand. The relay over MPI then is as slow.",
        "Ask MPI which network it uses: UCX_LOG_LEVEL=info (Open MPI with UCX), FI_LOG_LEVEL=info or MPIR_CVAR_DEBUG_SUMMARY=1 "
        "(MPICH). Open MPI from a distribution often lacks UCX, and the mpich wheel has no InfiniBand. Also measure without "
        "other jobs on the hosts.",
    ),
    FindingType(
        "slow-pair",
        "One pair of ranks, or one node, is slower than half of the others. All ranks wait for the slowest one.",
        "Look at cables, switch ports and NIC errors of those hosts (ibstat, ethtool), at processes that use their "
        "processors, and at the NVLinks of that node (nvidia-smi nvlink --status). Measure twice: other traffic may "
        "disturb a run.",
    ),
    # --- slots
    FindingType(
        "no-slots",
        "Ranks cannot come and go in a Buffer of this job (max_ranks). Its ranks must be on one host and have a slot each. On GPUs it "
        "needs virtual memory of CUDA, because the memory of NVSHMEM belongs to a fixed set of processes. Making it raises an error.",
        "Start all ranks on one host, pass a larger max_ranks, and unset DEEPEP_RT_SYMMETRIC_MEMORY and DEEPEP_RT_RANKS_PER_NODE. If "
        "the driver shares no virtual memory, no-virtual-memory says more.",
    ),
    FindingType(
        "store-unreachable",
        "The store where the ranks of a Buffer with slots meet does not answer. Making the Buffer, and each change of its members, raises "
        "EPUnavailableError.",
        "Start python -m deepep_rt store on a machine that stays, pass the address that it prints, and give all processes the same "
        "DEEPEP_RT_STORE_TOKEN. A firewall may hide its port from other hosts.",
    ),
    FindingType(
        "survivors-end",
        "The launcher may end all ranks when one dies. The others then do not live to call shrink. Open MPI 4 and torchrun "
        "always do so. MPICH and Slurm do so unless options forbid it.",
        "Start with mpirun -disable-auto-cleanup and a shell around each rank (MPICH; docs/slurm-and-mpirun.md has the command), or with "
        "srun --no-kill --kill-on-bad-exit=0 (Slurm), which was not tried. "
        "Otherwise start the processes in another way, without a launcher that ends them together.",
    ),
    # --- settings, cache, system
    FindingType(
        "wrong-setting",
        "The library does not understand the value of a DEEPEP_RT_ variable. Making a Buffer raises EPConfigError, or "
        "EPCompileError for a DEEPEP_RT_ARCH that NVRTC does not know.",
        "Correct or unset the variable. docs/running.md has a table of them.",
    ),
    FindingType(
        "unknown-setting",
        "The name of a variable begins like a setting of deepep_rt, but there is no such setting. It has no effect.",
        "Correct its name. docs/running.md has a table of all variables.",
    ),
    FindingType(
        "cache-not-writable",
        "The library cannot keep compiled kernels. A kernel that is not in the cache raises EPCacheError.",
        "Set DEEPEP_RT_CACHE_DIR to a folder that this user can write, or make this one writable. If you filled the cache "
        "ahead of time and made it read-only on purpose, set DEEPEP_RT_ASSERT_CACHED=1.",
    ),
    FindingType(
        "cache-corrupt",
        "Files of the kernel cache have changed since the library wrote them (a full disk, an interrupted copy). The "
        "library compiles these kernels again when it needs them.",
        "Nothing, or python -m deepep_rt cache clear. If it happens again, suspect the file system.",
    ),
    FindingType(
        "small-shm",
        "/dev/shm has little room. MPI and NVSHMEM keep shared memory there. If it is full, ranks die of SIGBUS or hang "
        "at the start.",
        "In a container, use --shm-size=1g or --ipc=host. Otherwise remove the files of ended programs from /dev/shm.",
    ),
    # --- ranks
    FindingType(
        "versions-differ",
        "Ranks run different versions of something. With different versions of deepep_rt or NVSHMEM they cannot work "
        "together. With other differences they may, and all wait for the slowest one.",
        "Start all ranks in the same environment: the same virtual environment on a shared file system, or the same "
        "container image, and the same modules on every host.",
    ),
    FindingType(
        "environment-differs",
        "Environment variables differ between ranks, but all ranks should have the same.",
        "Open MPI passes variables to other hosts only with mpirun -x NAME. MPICH passes all. Look for settings in a "
        "host's own shell start-up files.",
    ),
    FindingType(
        "caches-differ",
        "Ranks of one host use different cache folders, so each compiles for itself.",
        "Set DEEPEP_RT_CACHE_DIR to one folder for all ranks of a host.",
    ),
    FindingType(
        "probe-failed",
        "doctor could not collect some facts. Findings that need them are missing above.",
        "The message says why. A probe that dies or does not end often shows a broken driver or library. The same will "
        "happen to programs.",
    ),
)

FINDING_TYPES = {finding_type.name: finding_type for finding_type in _ALL}
