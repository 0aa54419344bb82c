/* holdfast-supervisor FOLDER [--copy] | --kill-user UID | --probe-private
 *
 * Runs the processes of one attempt, so that a worker may die at any time and another worker can adopt the attempt. It enforces
 * the time limits, keeps the output and records the end, all without a worker. There is one supervisor per attempt. On the host
 * it leads its own session; in a container it is PID 1. docs/supervisor.md describes everything in detail.
 *
 *   lock       locked exclusively (flock) while this program lives; others test it with a shared lock
 *   spec       in:  what to run: records of "key length\nbytes\n" after "holdfast-spec 1\n", ended by "end 0\n\n"
 *   stdin      in:  optional; without it the child reads /dev/null
 *   cmd/NAME   in:  commands: the same records after "holdfast-command 1\n"; each is removed, and acknowledged in the log
 *   started    out: JSON, written before the child's program runs; an attempt with this file is never started again
 *   log        out: frames of output and events; their format is in log.c
 *   space/     in and out: the folder `tree`, in which the tasks of a pipeline work, and folders that are to replace it
 *   tmp/       out: the /tmp of a child with a private view
 *   service    out: the output of the service
 *   exit       out: JSON, fsynced, written last and only when no descendant is alive
 *
 * This file has the command line, the lock, and the main steps of an attempt. The head of every other file says what it has. */
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

#define LOCK_TRIES 10000 /* one per millisecond */
#define TAKEN_TRIES 200

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

/* Close the descriptors of the worker, so that neither we nor the child keep them open. */
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

/* Retry, because others may hold the lock for a moment: a worker that tests it (shared), or the child of a supervisor that was
 * killed between fork and exec (exclusively, until it dies too). */
static bool take_lock(void) {
    lock_fd = openat(folder, "lock", O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (lock_fd < 0)
        return false;
    for (int tries = 0, taken = 0; tries < LOCK_TRIES && taken < TAKEN_TRIES; tries++) {
        if (flock(lock_fd, LOCK_EX | LOCK_NB) == 0)
            return true;
        if (flock(lock_fd, LOCK_SH | LOCK_NB) < 0)
            taken++;
        flock(lock_fd, LOCK_UN);
        usleep(1000);
    }
    return false;
}

static int exit_with(int status, const char *what) {
    fprintf(stderr, "holdfast-supervisor: %s\n", what);
    return status;
}

/* Return the exit status for a file that could not be created, by errno. */
static int broken_or_full(void) { return is_full(errno) ? LEFT_FULL : LEFT_BROKEN; }

static int exit_unreserved(void) {
    int status = broken_or_full();
    release_exit();
    return exit_with(status, "no room for `exit`");
}

static bool exists(const char *name) {
    struct stat about;
    return fstatat(folder, name, &about, AT_SYMLINK_NOFOLLOW) == 0 || errno != ENOENT;
}

static int supervise(void) {
    if (!take_lock())
        return lock_fd < 0 ? exit_with(broken_or_full(), "cannot open `lock`") : exit_with(LEFT_HELD, "another supervisor holds this folder");
    if (exists("started") || exists("exit"))
        return exit_with(LEFT_STARTED, "this attempt was started before");
    if (!reserve_exit(0))
        return exit_unreserved();
    if (!read_spec())
        return end_attempt();
    if (!reserve_exit(spec.task_count)) {
        if (is_full(errno))
            return exit_unreserved();
        snprintf(failure, sizeof failure, "no room for `exit`: %s", strerror(errno));
        return end_attempt();
    }
    highest_token = spec.token;
    count_oom_kills();
    watch_commands();
    int left = run_tasks();
    if (!left)
        return end_attempt();
    release_exit();
    return exit_with(left, left == LEFT_LATE ? "too late to start" : failure);
}

static int kill_user_command(const char *name) {
    uint64_t uid;
    if (!parse_number(name, UINT32_MAX - 1, &uid) || !uid)
        return exit_with(LEFT_USAGE, "--kill-user needs a uid, and not root's");
    return kill_user((uid_t)uid) ? 0 : exit_with(1, "cannot become that user");
}

int main(int argc, char **argv) {
    bool copy = argc == 3 && strcmp(argv[2], "--copy") == 0;
    if (argc == 3 && strcmp(argv[1], "--kill-user") == 0)
        return kill_user_command(argv[2]);
    if (argc == 2 && strcmp(argv[1], "--probe-private") == 0)
        return probe_private_view();
    if (argc == 2 && strcmp(argv[1], "--version") == 0) {
        puts("holdfast-supervisor " VERSION_TEXT);
        return 0;
    }
    if (argc < 2 || argc > 3 || (argc == 3 && !copy) || argv[1][0] == '-')
        return exit_with(LEFT_USAGE, "usage: holdfast-supervisor FOLDER [--copy]");
    open_standard_descriptors();
    close_inherited();
    prepare_signals();
    umask(077);
    setsid(); /* fails if we lead a session already */
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    folder = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0)
        return exit_with(LEFT_BROKEN, "cannot open the folder");
    if (chdir("/") < 0) /* do not keep the worker's folder busy */
        return exit_with(LEFT_BROKEN, "cannot enter /");
    if (copy)
        start_copy();
    return supervise();
}
