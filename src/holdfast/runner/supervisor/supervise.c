/* The main steps of an attempt: takes the lock of its folder, reads the spec, runs the tasks, records the end. Also prepares a process
 * to be a supervisor: its descriptors, signals and session. */
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
#include "loop.h"
#include "proc.h"
#include "protocol.h"
#include "spec.h"
#include "supervise.h"
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

void open_standard_descriptors(void) {
    int fd;
    do
        fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= 2);
    if (fd > 2)
        close(fd);
}

/* Close the descriptors of the worker, so that neither we nor the child keep them open. */
void close_inherited(unsigned first) {
    if (syscall(SYS_close_range, first, ~0u, 0u) == 0)
        return;
    DIR *open_fds = opendir("/proc/self/fd");
    if (!open_fds)
        return;
    uint64_t fd;
    for (struct dirent *entry; (entry = readdir(open_fds));)
        if (parse_number(entry->d_name, INT_MAX, &fd) && fd >= first && (int)fd != dirfd(open_fds))
            close((int)fd);
    closedir(open_fds);
}

/* Lead a session of our own, and become the parent of all descendants that lose theirs. */
void prepare_supervisor(void) {
    prepare_signals();
    umask(077);
    setsid(); /* fails if we lead a session already */
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
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

int exit_with(int status, const char *what) {
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

int supervise(void) {
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
