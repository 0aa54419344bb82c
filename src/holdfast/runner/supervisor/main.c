/* holdfast-supervisor FOLDER [--copy] | --kill-user UID | --probe-private
 *
 * Runs the process of one attempt, so that a worker may die at any instant and another one adopts what runs. It needs no
 * worker to keep the limits of time, to keep the output and to record the end. One per attempt; on the host it leads a
 * session of its own, in a container it is PID 1. docs/supervisor.md is the long form of what follows.
 *
 *   lock       held exclusively (flock) for as long as this program lives; others probe with a shared lock
 *   spec       in:  what to run; records of "key length\nbytes\n" after "holdfast-spec 1\n", closed by "end 0\n\n"
 *   stdin      in:  optional; else the child reads /dev/null
 *   cmd/NAME   in:  commands, the same records after "holdfast-command 1\n"; removed, and acknowledged in the log
 *   started    out: JSON, there before the child's program runs; a folder that has one is never started again
 *   log        out: frames of output and events; log.c has their format
 *   space/     in and out: the folder `tree` that the tasks of a held spec work in, and what is to take its place
 *   tmp/       out: what the child of a private spec has as /tmp
 *   service    out: what a service says
 *   exit       out: JSON, fsynced, written last and only when no descendant lives
 *
 * Here: the command line, the lock, and the order of an attempt. Each other file says at its top what lives there. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "attempt.h"
#include "commands.h"
#include "exit_file.h"
#include "files.h"
#include "log.h"
#include "loop.h"
#include "private_view.h"
#include "proc.h"
#include "process_tree.h"
#include "protocol.h"
#include "spec.h"
#include "tasks.h"
#include "text.h"

/* For headers older than the kernel; the number is the same on every machine. */
#ifndef SYS_close_range
#define SYS_close_range 436
#endif

#define LOCK_TRIES 10000 /* of a millisecond */
#define HELD_TRIES 200

int folder = -1, lock_fd = -1;
char failure[TEXT_ROOM];

static void open_standard_descriptors(void) {
    int fd;
    do
        fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= 2);
    if (fd > 2)
        close(fd);
}

/* What the worker had open is not ours to keep open, nor the child's. */
static void close_inherited(void) {
    if (syscall(SYS_close_range, 3u, ~0u, 0u) == 0)
        return;
    DIR *open_fds = opendir("/proc/self/fd");
    if (!open_fds)
        return;
    uint64_t fd;
    for (struct dirent *entry; (entry = readdir(open_fds));)
        if (parse_number(entry->d_name, INT_MAX, &fd) && fd > 2 && (int)fd != dirfd(open_fds))
            close((int)fd);
    closedir(open_fds);
}

/* A probe holds a shared lock for an instant. So does, exclusively, the child of a supervisor that was killed between fork
 * and exec: it dies at once, but not sooner than we may come. */
static bool take_lock(void) {
    lock_fd = openat(folder, "lock", O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (lock_fd < 0)
        return false;
    for (int tries = 0, taken = 0; tries < LOCK_TRIES && taken < HELD_TRIES; tries++) {
        if (flock(lock_fd, LOCK_EX | LOCK_NB) == 0)
            return true;
        if (flock(lock_fd, LOCK_SH | LOCK_NB) < 0)
            taken++;
        flock(lock_fd, LOCK_UN);
        usleep(1000);
    }
    return false;
}

static int leave(int status, const char *what) {
    fprintf(stderr, "holdfast-supervisor: %s\n", what);
    return status;
}

/* The status of a supervisor that could not make a file, by errno. */
static int broken_or_full(void) { return is_full(errno) ? LEFT_FULL : LEFT_BROKEN; }

static int leave_unreserved(void) {
    int status = broken_or_full();
    release_exit();
    return leave(status, "no room for `exit`");
}

static bool exists(const char *name) {
    struct stat about;
    return fstatat(folder, name, &about, AT_SYMLINK_NOFOLLOW) == 0 || errno != ENOENT;
}

static int supervise(void) {
    if (!take_lock())
        return lock_fd < 0 ? leave(broken_or_full(), "cannot open `lock`") : leave(LEFT_HELD, "another supervisor holds this folder");
    if (exists("started") || exists("exit"))
        return leave(LEFT_STARTED, "this attempt was started before");
    if (!reserve_exit(0))
        return leave_unreserved();
    if (!read_spec())
        return end_attempt();
    if (!reserve_exit(spec.task_count)) {
        if (is_full(errno))
            return leave_unreserved();
        snprintf(failure, sizeof failure, "no room for `exit`: %s", strerror(errno));
        return end_attempt();
    }
    highest_token = spec.token;
    note_oom_kills();
    watch_commands();
    int left = run_tasks();
    if (!left)
        return end_attempt();
    release_exit();
    return leave(left, left == LEFT_LATE ? "too late to start" : failure);
}

static int kill_user_called(const char *name) {
    uint64_t uid;
    if (!parse_number(name, UINT32_MAX - 1, &uid) || !uid)
        return leave(LEFT_USAGE, "--kill-user needs a uid, and not root's");
    return kill_user((uid_t)uid) ? 0 : leave(1, "cannot become that user");
}

int main(int argc, char **argv) {
    bool copy = argc == 3 && strcmp(argv[2], "--copy") == 0;
    if (argc == 3 && strcmp(argv[1], "--kill-user") == 0)
        return kill_user_called(argv[2]);
    if (argc == 2 && strcmp(argv[1], "--probe-private") == 0)
        return probe_privacy();
    if (argc == 2 && strcmp(argv[1], "--version") == 0) {
        puts("holdfast-supervisor " VERSION_TEXT);
        return 0;
    }
    if (argc < 2 || argc > 3 || (argc == 3 && !copy) || argv[1][0] == '-')
        return leave(LEFT_USAGE, "usage: holdfast-supervisor FOLDER [--copy]");
    open_standard_descriptors();
    close_inherited();
    prepare_signals();
    umask(077);
    setsid(); /* fails where we lead one already */
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    folder = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0)
        return leave(LEFT_BROKEN, "cannot open the folder");
    if (chdir("/") < 0) /* a folder of the worker's is not to be kept busy */
        return leave(LEFT_BROKEN, "cannot enter /");
    if (copy)
        start_copy();
    return supervise();
}
