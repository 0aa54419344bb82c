/* Runs the tasks of the attempt one after the other, and holds between them if the spec says so. Also writes `started`, which is
 * there before the first program runs. The process of one task is in task_process.c. */
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

struct held held;
micros attempt_begun, attempt_begun_at;

/* Record that the attempt has begun; on failure, errno says why. */
static bool record_started(void) {
    char data[2048], boot[64];
    struct text t = {.data = data, .size = sizeof data};
    struct stat_line self = {0}, child = {0};
    read_stat(getpid(), &self);
    read_stat(running.main, &child);
    read_boot_id(boot, sizeof boot);
    put(&t, "{\"version\":%d,\"token\":%" PRIu64, VERSION, spec.token);
    put_field(&t, "mark", spec.mark);
    put_field(&t, "boot_id", boot);
    put(&t, ",\"supervisor_pid\":%d,\"supervisor_start_ticks\":%" PRIu64, getpid(), self.start_ticks);
    put(&t, ",\"child_pid\":%d,\"child_start_ticks\":%" PRIu64, running.main, child.start_ticks);
    put(&t, ",\"supervisor_session\":%d,\"child_session\":%d", getsid(0), running.main);
    put(&t, ",\"started_at\":%" PRId64 ",\"boottime\":%" PRId64 "}\n", attempt_begun_at, attempt_begun);
    int fd = openat(folder, "started.tmp", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    bool written = fd >= 0 && write_all(fd, t.data, t.used) && renameat(folder, "started.tmp", folder, "started") == 0;
    int error = errno;
    if (!written) {
        snprintf(failure, sizeof failure, "cannot write `started`: %s", strerror(error));
        unlinkat(folder, "started.tmp", 0);
    }
    close_fd(&fd);
    errno = error;
    return written;
}

static void fail_start(struct task *task) {
    task->cause = CAUSE_START_FAILED;
    task->code = -1;
}

/* Make what the attempt writes to from its first moment; `started` last, as nothing may fail for lack of space after it. */
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

/* The first child waits while `started` is written: a program that ran without that mark could run twice. The answer is 0, or the
 * exit status of a supervisor that leaves without a trace. */
static int start_attempt(struct task *task) {
    if (!fork_child(task)) {
        fail_start(task);
        return 0;
    }
    attempt_begun = boottime();
    attempt_begun_at = walltime();
    if (attempt_begun >= spec.start_by) {
        dismiss_child();
        return LEFT_LATE;
    }
    if (attempt_begun >= spec.stop_after) {
        stop_state.reason = CAUSE_STOP_AFTER;
        stop_state.by = "limit";
        dismiss_child();
    } else if (!make_files()) {
        bool full = is_full(errno);
        dismiss_child();
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

/* No descendant lives, so what is in the pipes is all there will be; a process elsewhere may hold them open for ever. */
static bool task_over(void) {
    if (running.main || running.children_left)
        return false;
    return drain_outputs() || boottime() >= later(running.drain_until, FLUSH_COPY);
}

static void tell_task_ended(const struct task *task) {
    struct text *t = event("task_ended");
    put_field(t, "name", task->name);
    put_field(t, "cause", CAUSES[task->cause]);
    if (task->code >= 0)
        put(t, ",\"code\":%d", task->code);
    if (task->signal)
        put(t, ",\"signal\":%d", task->signal);
    send_event();
}

static void see_task_through(struct task *task) {
    while (!task_over()) {
        bool noticed = wait_for_news();
        read_report();
        read_outputs();
        look_for_commands(noticed);
        check_limits();
        advance_stop();
    }
    close_task();
    tell_task_ended(task);
}

/* Wait for the command to go on: meanwhile the owner of the attempt restores, keeps or replaces what the tasks work on. The answer is
 * whether there is a task to run. */
static bool hold(void) {
    held.on = true;
    held.go = held.end = false;
    put(event("holding"), ",\"task\":%u", held.next);
    send_event();
    while (!held.go && !held.end && !stop_state.reason) {
        look_for_commands(wait_for_news());
        check_limits();
    }
    held.on = false;
    return held.go && !stop_state.reason;
}

/* Between two tasks a stop or a deadline counts as if it had come during one. */
static bool may_go_on(const struct task *before) {
    if (before->cause != CAUSE_EXIT || before->code != 0)
        return false;
    look_for_commands(true);
    if (!stop_state.reason && boottime() >= spec.stop_after) {
        stop_state.reason = CAUSE_STOP_AFTER;
        stop_state.by = "limit";
    }
    return !stop_state.reason;
}

/* The service goes last. It has the grace of a stop, and is killed with all that is left then. */
static void end_service(void) {
    if (service.pid)
        ask_service_to_end();
    service.ending = true;
    stop_state.killing = false;
    stop_state.kill_at = stop_state.stopping ? stop_state.kill_at : later(boottime(), spec.stop_grace);
    stop_state.stopping = true;
    reap();
    while (running.children_left) {
        look_for_commands(wait_for_news());
        if (!service.pid)
            start_killing();
        advance_stop();
    }
}

/* Run the tasks one after the other; the first that fails ends the attempt. The answer is 0, or if nothing ran because it is too
 * late or the disk is full, the exit status that says so. */
int run_tasks(void) {
    int left = start_attempt(spec.tasks);
    if (left || !running.main)
        return left;
    if (spec.hold)
        dismiss_child(); /* it was there to be recorded: which task is first is not known yet */
    while (spec.hold ? hold() : held.next < spec.task_count) {
        struct task *task = &spec.tasks[running.number = held.next];
        number_frames(running.number);
        if (!begin_task(task))
            break;
        see_task_through(task);
        held.next++;
        if ((spec.hold || held.next < spec.task_count) && !may_go_on(task))
            break;
    }
    if (spec.hold)
        end_service();
    return 0;
}
