/* Runs the tasks of the attempt one after the other. In a pipeline it waits for a command at every task boundary. Also writes
 * `started`, before the first program runs. The process of one task is in task_process.c. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "attempt.h"
#include "commands.h"
#include "files.h"
#include "launch.h"
#include "log.h"
#include "loop.h"
#include "output.h"
#include "private_view.h"
#include "proc.h"
#include "service.h"
#include "spec.h"
#include "stop.h"
#include "task_process.h"
#include "tasks.h"

struct boundary boundary;
micros attempt_begun, attempt_begun_at;

/* Record that the attempt has begun; on failure, errno says why. */
static bool record_started(void) {
    char data[2048];
    struct text t = {.data = data, .size = sizeof data};
    struct stat_line self = {0}, child = {0};
    read_stat(getpid(), &self);
    read_stat(running.main, &child);
    put(&t, "{\"version\":%d,\"token\":%" PRIu64, VERSION, spec.token);
    put_field(&t, "mark", spec.mark);
    put_field(&t, "boot_id", boot_id());
    put(&t, ",\"supervisor_pid\":%d,\"supervisor_start_ticks\":%" PRIu64, getpid(), self.start_ticks);
    put(&t, ",\"child_pid\":%d,\"child_start_ticks\":%" PRIu64, running.main, child.start_ticks);
    put(&t, ",\"supervisor_session\":%d,\"child_session\":%d", getsid(0), running.main);
    put(&t, ",\"started_at\":%" PRId64 ",\"boottime\":%" PRId64 "}\n", attempt_begun_at, attempt_begun);
    int fd = openat(folder, "started.tmp", O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    bool written = fd >= 0 && write_all(fd, t.data, t.used) && ftruncate(fd, (off_t)t.used) == 0 && renameat(folder, "started.tmp", folder, "started") == 0;
    int error = errno;
    if (!written) {
        snprintf(failure, sizeof failure, "cannot write `started`: %s", strerror(error));
        unlinkat(folder, "started.tmp", 0);
    }
    close_fd(&fd);
    if (written)
        report_begun();
    errno = error;
    return written;
}

static void fail_start(struct task *task) {
    task->cause = CAUSE_START_FAILED;
    task->code = -1;
}

/* Create the files that the attempt writes from its beginning. `started` comes last: nothing after it may fail for lack of space. */
static bool make_files(void) {
    if (!open_log())
        return false;
    if (spec.private_view && !make_private_tmp()) {
        int error = errno;
        snprintf(failure, sizeof failure, "cannot make `tmp`: %s", strerror(error));
        errno = error;
        return false;
    }
    return record_started();
}

/* Start the attempt. The first child waits until `started` is written: a program that ran without that file could run twice. Return
 * 0, or the exit status of a supervisor that exits without having written anything. */
static int start_attempt(struct task *task) {
    if (!fork_child(task)) {
        fail_start(task);
        return 0;
    }
    attempt_begun = boottime();
    attempt_begun_at = walltime();
    if (attempt_begun >= spec.start_by) {
        discard_child();
        return LEFT_LATE;
    }
    if (attempt_begun >= spec.stop_after) {
        stop_state.reason = CAUSE_STOP_AFTER;
        stop_state.by = "limit";
        discard_child();
    } else if (!make_files()) {
        bool full = is_full(errno);
        discard_child();
        if (full) {
            unlinkat(folder, "log", 0);
            return LEFT_FULL;
        }
        fail_start(task);
    }
    return 0;
}

static bool begin_task(struct task *task) {
    stop_state.killing = false;
    if (!running.main && !fork_child(task)) {
        fail_start(task);
        return false;
    }
    release_child(task);
    return true;
}

/* If no descendant is alive, nothing more will be written to the pipes, even if another process keeps them open forever. */
static bool task_over(void) {
    if (running.main || running.children_left)
        return false;
    return drain_outputs() || boottime() >= later(running.drain_until, FLUSH_SECONDS);
}

static void report_task_ended(const struct task *task) {
    struct text *t = event("task_ended");
    put_field(t, "name", task->name);
    put_field(t, "cause", CAUSES[task->cause]);
    if (task->code >= 0)
        put(t, ",\"code\":%d", task->code);
    if (task->signal)
        put(t, ",\"signal\":%d", task->signal);
    send_event();
}

static void supervise_task(struct task *task) {
    while (!task_over()) {
        bool noticed = wait_for_activity();
        read_outputs();
        poll_commands(noticed);
        check_limits();
        advance_stop();
    }
    close_task();
    report_task_ended(task);
}

/* Wait for a command at a task boundary. Meanwhile the worker may copy or replace the workspace. Return whether there is a task to
 * run. */
static bool wait_at_boundary(void) {
    boundary.waiting = true;
    boundary.go = boundary.end = false;
    put(event("holding"), ",\"task\":%u", boundary.next);
    send_event();
    while (!boundary.go && !boundary.end && !stop_state.reason) {
        poll_commands(wait_for_activity());
        check_limits();
    }
    boundary.waiting = false;
    return boundary.go && !stop_state.reason;
}

/* Return whether the next task may run. A stop or a deadline between two tasks has the same effect as during a task. */
static bool may_continue(const struct task *before) {
    if (before->cause != CAUSE_EXIT || before->code != 0)
        return false;
    poll_commands(true);
    if (!stop_state.reason && boottime() >= spec.stop_after) {
        stop_state.reason = CAUSE_STOP_AFTER;
        stop_state.by = "limit";
    }
    return !stop_state.reason;
}

/* End the service, after all tasks. It gets the grace period of a stop, then it is killed with all other processes. */
static void end_service(void) {
    if (service.pid)
        ask_service_to_end();
    service.ending = true;
    stop_state.killing = false;
    stop_state.kill_at = stop_state.stopping ? stop_state.kill_at : later(boottime(), spec.stop_grace);
    stop_state.stopping = true;
    reap();
    while (running.children_left) {
        poll_commands(wait_for_activity());
        if (!service.pid)
            start_killing();
        advance_stop();
    }
}

/* Run the tasks one after the other. The first failure ends the attempt. Return 0, or if nothing ran because it was too late or the
 * disk was full, the exit status for that. */
int run_tasks(void) {
    int left = start_attempt(spec.tasks);
    if (left || !running.main)
        return left;
    if (spec.hold)
        discard_child(); /* it was needed only for `started`: a command will say which task is first */
    while (spec.hold ? wait_at_boundary() : boundary.next < spec.task_count) {
        struct task *task = &spec.tasks[running.number = boundary.next];
        number_frames(running.number);
        if (!begin_task(task))
            break;
        supervise_task(task);
        boundary.next++;
        if ((spec.hold || boundary.next < spec.task_count) && !may_continue(task))
            break;
    }
    if (spec.hold)
        end_service();
    return 0;
}
