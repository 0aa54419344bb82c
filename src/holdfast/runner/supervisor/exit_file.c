/* Writes the exit record `exit`: JSON, fsynced, written last and only when no descendant is alive. Disk space for it is reserved
 * before anything runs, so that the end can be recorded on a full disk. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "attempt.h"
#include "clock.h"
#include "commands.h"
#include "exit_file.h"
#include "log.h"
#include "proc.h"
#include "process_tree.h"
#include "spec.h"
#include "stop.h"
#include "tasks.h"
#include "text.h"

#define EXIT_SIZE 8192
#define TASK_SIZE 640
#define RECORD_SECONDS (30 * SECOND)

static int reserved = -1;
static size_t exit_room = EXIT_SIZE;

static bool reserve(size_t size) {
    if (reserved < 0)
        reserved = openat(folder, "exit.tmp", O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (reserved < 0)
        return false;
    int error = posix_fallocate(reserved, 0, (off_t)size);
    if (error < 0) /* zig's C library returns -1 and sets errno, unlike POSIX, glibc and musl */
        error = errno;
    static const char zeros[4096];
    if (error == EOPNOTSUPP || error == ENOSYS || error == EINVAL) {
        error = 0;
        for (size_t at = 0; at < size && !error; at += sizeof zeros)
            if (pwrite(reserved, zeros, sizeof zeros, (off_t)at) != sizeof zeros)
                error = errno ? errno : ENOSPC;
    }
    errno = error;
    return !error;
}

/* Reserve the disk space that `exit` needs for this number of tasks. */
bool reserve_exit(size_t tasks) {
    exit_room = EXIT_SIZE + tasks * TASK_SIZE;
    return reserve(exit_room);
}

void release_exit(void) { unlinkat(folder, "exit.tmp", 0); }

static enum cause final_cause(const struct task *last) {
    if (stop_state.reason)
        return stop_state.reason;
    if (boundary.end)
        return CAUSE_EXIT;
    if (!last || last->cause == CAUSE_NONE)
        return CAUSE_START_FAILED;
    return last->cause;
}

static void put_end(struct text *t, const struct task *task) {
    if (!task && boundary.end && !stop_state.reason)
        put(t, ",\"code\":0");
    if (task && task->ended && task->code >= 0)
        put(t, ",\"code\":%d", task->code);
    if (task && task->ended && task->signal)
        put(t, ",\"signal\":%d", task->signal);
}

static void put_tasks(struct text *t) {
    put(t, ",\"tasks\":[");
    const char *comma = "";
    for (size_t i = 0; i < spec.task_count; i++) {
        const struct task *task = &spec.tasks[i];
        if (!task->begun)
            continue;
        put(t, "%s{\"name\":", comma);
        comma = ",";
        put_string(t, task->name);
        put_field(t, "cause", CAUSES[task->cause]);
        put_end(t, task);
        put(t, ",\"started_at\":%" PRId64 ",\"ended_at\":%" PRId64 "}", task->started_at, task->ended_at);
    }
    put(t, "]");
}

static void put_usage(struct text *t) {
    struct rusage used;
    getrusage(RUSAGE_CHILDREN, &used);
    micros user = used.ru_utime.tv_sec * SECOND + used.ru_utime.tv_usec, system = used.ru_stime.tv_sec * SECOND + used.ru_stime.tv_usec;
    put(t, ",\"user_time\":%" PRId64 ",\"system_time\":%" PRId64 ",\"max_rss\":%" PRId64, user, system, (int64_t)used.ru_maxrss * 1024);
}

static const struct task *last_task(void) {
    const struct task *last = NULL;
    for (size_t i = 0; i < spec.task_count; i++)
        if (spec.tasks[i].begun || spec.tasks[i].cause != CAUSE_NONE)
            last = &spec.tasks[i];
    return last;
}

static void describe_end(struct text *t, const struct task *last) {
    enum cause cause = final_cause(last);
    put(t, "{\"version\":%d,\"token\":%" PRIu64, VERSION, highest_token);
    put_field(t, "cause", CAUSES[cause]);
    put_end(t, last);
    put_field(t, "reason", stop_state.reason ? CAUSES[stop_state.reason] : "");
    put_field(t, "stopped_by", stop_state.reason ? stop_state.by : "");
    put(t, ",\"killed\":%s", stop_state.killed ? "true" : "false");
    put_field(t, "text", failure);
    put_field(t, "mark", spec.mark ? spec.mark : "");
    put_field(t, "boot_id", boot_id());
    put(t, ",\"started_at\":%" PRId64 ",\"ended_at\":%" PRId64 ",\"lasted\":%" PRId64, attempt_begun_at, walltime(),
        attempt_begun ? boottime() - attempt_begun : 0);
    put(t, ",\"oom_kills\":%" PRIu64, new_oom_kills());
    put_log(t);
    put_usage(t);
    put_tasks(t);
    put(t, "}\n");
}

static bool record_end(const struct text *t) {
    if (reserved < 0 && !reserve(t->used))
        return false;
    if (pwrite(reserved, t->data, t->used, 0) != (ssize_t)t->used || ftruncate(reserved, (off_t)t->used) < 0)
        return false;
    fsync(reserved); /* if the sync fails, the file may still be kept */
    if (renameat(folder, "exit.tmp", folder, "exit") < 0)
        return false;
    fsync(folder);
    return true;
}

static int exit_status(const struct task *last) {
    enum cause cause = final_cause(last);
    if (cause == CAUSE_TIMED_OUT || cause == CAUSE_IDLE_TIMEOUT || cause == CAUSE_STOP_AFTER)
        return ENDED_LATE;
    if (!last && cause == CAUSE_EXIT)
        return 0;
    if (!last || !last->ended || cause == CAUSE_START_FAILED || cause == CAUSE_SERVICE_ENDED || cause == CAUSE_FAILED)
        return ENDED_UNSTARTED;
    return last->signal ? 128 + last->signal : last->code;
}

/* Write `exit`, retrying for a while: a failing disk may recover. */
static bool record_with_retries(const struct text *t) {
    micros until = boottime() + RECORD_SECONDS;
    while (!record_end(t)) {
        int error = errno;
        if (boottime() >= until || error == ENOENT || error == EROFS) {
            fprintf(stderr, "holdfast-supervisor: cannot write `exit`: %s\n", strerror(error));
            return false;
        }
        usleep(500000);
    }
    return true;
}

/* Record the end of the attempt, and return the exit status of this program. */
int end_attempt(void) {
    const struct task *last = last_task();
    struct text t = {.data = malloc(exit_room), .size = exit_room};
    if (spec.sole_user && geteuid() == 0)
        kill_user((uid_t)spec.uid); /* no descendant is left; nothing else of this user may outlive the attempt */
    finish_copy();
    if (!t.data)
        return LEFT_BROKEN;
    describe_end(&t, last);
    bool recorded = record_with_retries(&t);
    if (recorded)
        copy_end(&t);
    free(t.data);
    return recorded ? exit_status(last) : LEFT_BROKEN;
}
