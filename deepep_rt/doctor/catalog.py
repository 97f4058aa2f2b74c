"""Every finding that doctor can make: what it means and what to do. `docs/when-it-does-not-work.md` has a section for each."""

from __future__ import annotations

from dataclasses import dataclass

MIN_NVSHMEM = "3.4.5"
"""As pyproject.toml asks for."""

MIN_SHM_BYTES = 128 << 20
MIN_MEMLOCK_BYTES = 1 << 30


@dataclass(frozen=True)
class Kind:
    """A kind of finding.

    Attributes:
        name: As it is printed, and the heading of its section in the documentation.
        meaning: What follows from it.
        remedy: What to do.
    """

    name: str
    meaning: str
    remedy: str


_ALL = (
    # --- MPI
    Kind(
        "no-mpi4py",
        "Buffers are made over an mpi4py communicator, on GPUs too; only those of a torch.distributed group can do without. "
        "mpi4py is not installed, or it finds no MPI library.",
        "pip install 'deepep_rt[mpich]' brings an MPI and its mpirun. With an MPI of your own, put its library where the "
        "loader finds it (module load, LD_LIBRARY_PATH), or build mpi4py for it: pip install --no-binary mpi4py mpi4py.",
    ),
    Kind(
        "no-mpirun",
        "There is no mpirun on the PATH, so nothing starts more than one rank.",
        "Activate the environment that holds it, call it by its path, or pip install 'deepep_rt[mpich]'. Under Slurm, "
        "srun can start the ranks too.",
    ),
    Kind(
        "wrong-mpirun",
        "The launcher belongs to one MPI and mpi4py uses another. MPI then ends with an error about PMI or PMIx, or each "
        "process believes that it is rank 0 of 1: programs seem to work, but every rank computes alone.",
        "Start with the mpirun of the MPI that mpi4py uses (the one that pip installed lies beside this python), or "
        "install mpi4py for the MPI that you start with: pip install --force-reinstall --no-binary mpi4py mpi4py, with "
        "that MPI's mpicc on the PATH.",
    ),
    Kind(
        "other-launcher",
        "The processes were started by torchrun or another launcher that is not MPI's. To MPI each is rank 0 of 1: where a "
        "program gives a Buffer MPI.COMM_WORLD, it seems to work, but every process computes alone.",
        "With PyTorch, give it deepep_rt.torch.communicator(), which needs no MPI. Otherwise start with mpirun (or srun), one "
        "process for each GPU. If this is one process that nothing else was started with, unset WORLD_SIZE.",
    ),
    Kind(
        "mpi-does-not-start",
        "MPI was found, but MPI_Init failed or hung, or not all ranks came. No Buffer can be made.",
        "The message is MPI's own. Common causes: a mpirun of another MPI, a full or tiny /dev/shm, a network interface "
        "that MPI should not use (Open MPI: --mca btl_tcp_if_include, MPICH: FI_PROVIDER=tcp or FI_TCP_IFACE), hosts that "
        "cannot reach each other. As root, Open MPI starts only with OMPI_ALLOW_RUN_AS_ROOT=1 and "
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1. Without mpirun, on a machine without ssh, Open MPI 4 starts only with OMPI_MCA_plm=isolated.",
    ),
    # --- GPUs
    Kind(
        "no-gpu",
        "No NVIDIA GPU was found. With backend='auto', Buffers run on the host backend (NumPy and MPI): the same results, far "
        "slower. With backend='cuda', making one raises EPUnavailableError.",
        "On a machine that has GPUs, install NVIDIA's driver; in a container, pass the GPUs in (docker run --gpus all). Without "
        "GPUs on purpose, choose backend='auto' (the default) or 'host'.",
    ),
    Kind(
        "gpu-hidden",
        "The machine has GPUs, but this process sees none of them. With backend='auto', Buffers fall back to the host backend; "
        "with backend='cuda', making one raises EPUnavailableError.",
        "Unset CUDA_VISIBLE_DEVICES, or set it to GPUs that exist. In a container, pass the GPUs in (docker run --gpus "
        "all); under Slurm, ask for them (--gpus-per-node).",
    ),
    Kind(
        "neighbours-hidden",
        "A rank sees only its own GPU, or not those of all its neighbours. NVSHMEM then asks NVML which GPUs reach each "
        "other, and maps their memory where NVML says so. Where NVML does not see them either, as in containers that hold "
        "one GPU each, making a Buffer raises EPUnavailableError.",
        "Give all ranks of a host the same CUDA_VISIBLE_DEVICES, or none (under Slurm no --gpus-per-task and no "
        "--gpu-bind, under Ray RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1): each takes the GPU with its own number on "
        "the host, unless the program chooses another one.",
    ),
    Kind(
        "driver-fails",
        "There is an NVIDIA driver, but CUDA does not start. CUDA_ERROR_SYSTEM_NOT_READY: the fabric manager of a machine "
        "with NVSwitch is not running. CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: the driver was updated and the machine not "
        "restarted, or a container brings a libcuda of its own. CUDA_ERROR_UNKNOWN: often the module nvidia_uvm is "
        "missing.",
        "Look at nvidia-smi and dmesg. systemctl start nvidia-fabricmanager (in the version of the driver), restart the "
        "machine after an update of the driver, or modprobe nvidia_uvm, each as administrator.",
    ),
    Kind(
        "gpu-lost",
        "The driver counts a GPU that it cannot reach. Often the GPU fell off the bus (Xid 79 in dmesg).",
        "Reset the GPU or restart the machine, as administrator. If it happens again, suspect the hardware.",
    ),
    Kind(
        "driver-too-old",
        "NVRTC is of a newer CUDA than the driver serves: kernels compile, but cannot be loaded.",
        "Install the CUDA libraries for the driver (pip install 'deepep_rt[cuda12]' instead of 'deepep_rt[cuda13]'), or a "
        "newer driver.",
    ),
    Kind(
        "gpu-too-old",
        "A GPU is older than the kernels need: sm_80 (A100) is the oldest that works.",
        "Leave it out with CUDA_VISIBLE_DEVICES, or use backend='host'.",
    ),
    Kind(
        "compiler-too-old",
        "NVRTC does not know the architecture of a GPU: its kernels cannot be compiled.",
        "Install a newer NVRTC: pip install --upgrade 'deepep_rt[cuda12]' or 'deepep_rt[cuda13]'.",
    ),
    Kind(
        "mig",
        "A GPU is divided by MIG. Its parts cannot reach each other's memory, nor other GPUs, so only a Buffer of one "
        "rank works.",
        "Turn MIG off for GPUs that run deepep_rt (nvidia-smi -mig 0, as administrator).",
    ),
    Kind(
        "no-peer-access",
        "GPUs of one host cannot map each other's memory. Ranks that use them cannot share a Buffer (except in different "
        "groups of ranks_per_node, through NVSHMEM).",
        "In a virtual machine or with PCIe ACS or IOMMU on, peer access may be disabled: ask the administrator. Else "
        "choose GPUs that reach each other with CUDA_VISIBLE_DEVICES.",
    ),
    Kind(
        "no-nvlink",
        "GPUs reach each other over PCIe only. Everything works, at a fraction of the speed that NVLink gives.",
        "Choose GPUs that NVLink connects with CUDA_VISIBLE_DEVICES, if there are any. If NVLink should be there: "
        "nvidia-smi nvlink --status, and the fabric manager's log.",
    ),
    Kind(
        "nvlink-uneven",
        "GPUs of one model have different numbers of active NVLinks, so some links are down. The slowest rank sets the "
        "pace of all.",
        "nvidia-smi nvlink --status shows which. Reset the GPU or restart the machine, as administrator; a link that "
        "stays down is a fault of the hardware.",
    ),
    Kind(
        "shared-gpu",
        "Several ranks would use one GPU. Kernels of one wait for kernels of the other, which do not run: Buffer refuses "
        "it, unless DEEPEP_RT_SHARE_GPUS=1 lets ranks take turns (right results, very slowly; under NVIDIA's MPS, at once).",
        "Start at most as many ranks on a host as it has GPUs, and give no rank a CUDA_VISIBLE_DEVICES that names the GPU "
        "of another one.",
    ),
    Kind(
        "gpus-on-some-ranks",
        "Some ranks see a GPU and others see none: Buffer(backend='auto') refuses that.",
        "Give every rank a GPU, or choose backend='host' on all of them.",
    ),
    Kind(
        "uneven-hosts",
        "Ranks of one host must follow each other, every host must hold the same number of them, and NVLink connects at "
        "most 8 in a Buffer.",
        "Place ranks host by host: with 8 a host, mpirun --map-by ppr:8:node (Open MPI), mpirun -ppn 8 (MPICH) or srun "
        "--ntasks-per-node=8 --distribution=block (Slurm).",
    ),
    Kind(
        "not-enough-memory",
        "A Buffer of these sizes takes more memory than a GPU has free: making it raises EPOutOfMemoryError.",
        "End other processes on the GPU (nvidia-smi shows them), limit what a framework takes in advance "
        "(XLA_PYTHON_CLIENT_MEM_FRACTION for JAX), or lower num_max_tokens_per_rank or num_slots.",
    ),
    Kind(
        "wrong-sizes",
        "A Buffer cannot have these sizes; its memory cannot be told.",
        "Give doctor the sizes that the program uses: --tokens, --hidden, --topk, --experts, --dtype, --slots, --ranks.",
    ),
    # --- libraries
    Kind(
        "no-cuda-packages",
        "A CUDA library or its Python binding cannot be loaded. The CUDA backend needs all of them; the host backend needs none.",
        "pip install 'deepep_rt[cuda12]' or 'deepep_rt[cuda13]', whichever matches the driver.",
    ),
    Kind(
        "mixed-cuda-packages",
        "Packages for different CUDA versions are installed together. Wheels of both versions may overwrite each other's files.",
        "Make a new environment, and install only 'deepep_rt[cuda12]' or only 'deepep_rt[cuda13]', and frameworks for the "
        "same CUDA.",
    ),
    Kind(
        "no-nvshmem",
        "NVSHMEM or nvshmem4py is missing or cannot be loaded. The CUDA backend takes its memory from NVSHMEM.",
        "pip install 'deepep_rt[cuda12]' or 'deepep_rt[cuda13]', whichever matches the driver. If it is installed, the "
        "message tells which library it misses.",
    ),
    Kind(
        "nvshmem-too-old",
        "NVSHMEM is older than 3.4.5: its device library does not link with code from NVRTC.",
        "pip install --upgrade nvidia-nvshmem-cu12 (or -cu13). If another NVSHMEM is found first, remove it from "
        "LD_LIBRARY_PATH and from the module environment.",
    ),
    Kind(
        "nvshmem-mismatch",
        "Kernels would be linked with the device library of one NVSHMEM and run with the host library of another. "
        "Versions must be the same.",
        "Keep one NVSHMEM: remove others from LD_LIBRARY_PATH, CUDA_HOME and the module environment, or reinstall "
        "nvidia-nvshmem-cu12 (or -cu13), then python -m deepep_rt cache clear.",
    ),
    # --- network
    Kind(
        "no-nic",
        "The ranks are on several hosts, and a host has no RDMA NIC that is up and may be used.",
        "Look at ibstat or ibv_devinfo. In a container, pass /dev/infiniband in. On a cloud, choose machines with RDMA "
        "(InfiniBand, RoCE, EFA) and NVSHMEM_REMOTE_TRANSPORT to match; docs/several-nodes.md has the list.",
    ),
    Kind(
        "nic-down",
        "Ports of RDMA NICs are not active. Ranks whose GPUs lie next to them take another NIC, and share its bandwidth.",
        "If the port should be up, look at its cable, the switch and the subnet manager (ibstat). Otherwise nothing.",
    ),
    Kind(
        "no-gpudirect",
        "NICs may not be able to reach GPU memory: neither the module nvidia-peermem is loaded nor the driver one with "
        "open kernel modules (which has DMA-BUF).",
        "modprobe nvidia-peermem, as administrator, or install the driver with its open kernel modules.",
    ),
    Kind(
        "ibgda-parameters",
        "The NVIDIA driver runs without the parameters that IBGDA needs for GPUs to ring a NIC's doorbell. NVSHMEM then "
        "lets the CPU ring it, which is slower.",
        'Put options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="PeerMappingOverride=1;" into '
        "/etc/modprobe.d/nvidia.conf, as administrator, and restart the machine. docs/several-nodes.md says more.",
    ),
    Kind(
        "no-gdrcopy",
        "GDRCopy is not complete (module gdrdrv and library libgdrapi). NVSHMEM's proxy transports use it for atomic "
        "operations, IBGDA for a doorbell that the CPU rings.",
        "Install GDRCopy (github.com/NVIDIA/gdrcopy), both parts; in a container, pass /dev/gdrdrv in.",
    ),
    Kind(
        "memlock",
        "The limit on locked memory is low. RDMA registers memory, which locks it, and fails at this limit.",
        "Raise it: ulimit -l unlimited, in Slurm PropagateResourceLimitsExcept=MEMLOCK, in a container --ulimit memlock=-1.",
    ),
    # --- settings, cache, system
    Kind(
        "wrong-setting",
        "A DEEPEP_RT_ variable has a value that is not understood. Making a Buffer raises EPConfigError, or EPCompileError for a "
        "DEEPEP_RT_ARCH that NVRTC does not know.",
        "Correct or unset the variable; docs/configuration.md has a table of them.",
    ),
    Kind(
        "unknown-setting",
        "A variable looks like a setting of deepep_rt, and is none: it has no effect.",
        "Correct its name; docs/configuration.md has a table of all variables.",
    ),
    Kind(
        "cache-not-writable",
        "Compiled kernels cannot be kept: a kernel that is not in the cache raises EPCacheError.",
        "Set DEEPEP_RT_CACHE_DIR to a folder that this user can write, or make this one writable. With a cache that is "
        "filled ahead of time and read-only on purpose, set DEEPEP_RT_ASSERT_CACHED=1.",
    ),
    Kind(
        "cache-corrupt",
        "Files of the kernel cache are not what was once written (a full disk, an interrupted copy). They are compiled "
        "again when they are needed.",
        "Nothing, or python -m deepep_rt cache clear. If it comes back, suspect the file system.",
    ),
    Kind(
        "small-shm",
        "/dev/shm has little room. MPI and NVSHMEM keep shared memory there; when it is full, ranks die of SIGBUS or hang "
        "at the start.",
        "In a container: --shm-size=1g or --ipc=host. Else remove what ended programs left in /dev/shm.",
    ),
    # --- ranks
    Kind(
        "versions-differ",
        "Ranks run different versions of something. With different versions of deepep_rt or NVSHMEM they do not "
        "understand each other; with other differences they may, and the slowest sets the pace.",
        "Start all ranks in the same environment: the same virtual environment on a shared file system, or the same "
        "container image, and the same modules on every host.",
    ),
    Kind(
        "environment-differs",
        "Environment variables differ between ranks, though all should have the same.",
        "Open MPI passes variables to other hosts only when told to (mpirun -x NAME); MPICH passes all. Look for settings "
        "in a host's own shell start-up files.",
    ),
    Kind(
        "caches-differ",
        "Ranks of one host use different cache folders: each compiles for itself.",
        "Set DEEPEP_RT_CACHE_DIR to one folder for all ranks of a host.",
    ),
    Kind(
        "probe-failed",
        "doctor could not find something out; what it would have said is missing above.",
        "The message tells why. A probe that is killed or does not end often shows a broken driver or library: the same "
        "will happen to programs.",
    ),
)

KINDS = {kind.name: kind for kind in _ALL}
