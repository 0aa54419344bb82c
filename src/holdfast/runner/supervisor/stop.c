/* The stop sequence: SIGTERM, a grace period, then SIGKILL until no process is left; and the time limits that start it. The
 * processes are signalled in process_tree.c.
 *
 * If we sent a signal before the child ended, its reason is the cause of the end. Otherwise the child's own end is the cause. */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <signal.h>

#include "log.h"
#include "process_tree.h"
#include "service.h"
#include "spec.h"
#include "stop.h"
#include "task_process.h"
#include "tasks.h"
#include "text.h"

#define NOT_DEAD_AFTER (5 * SECOND)

const char *const CAUSES[] = {CAUSE_NAMES};

struct stop_state stop_state;

/* Signal a process group only while its leader is not reaped: after that its number may be reused. */
static void signal_group(int sig) {
    if (running.main && kill(-running.main, sig) < 0 && errno == ESRCH)
        kill(running.main, sig); /* it has not created its group yet */
}

void start_killing(void) {
    micros now = boottime();
    if (stop_state.killing)
        return;
    stop_state.killing = true;
    stop_state.since = stop_state.next = now;
    stop_state.pause = 2 * MS;
    stop_state.report_at = later(now, NOT_DEAD_AFTER);
    if (!running.children_left)
        return;
    stop_state.killed = true;
    put_field(event("killed"), "reason", stop_state.reason ? CAUSES[stop_state.reason] : "leftovers");
    send_event();
}

static void report_not_dead(micros now) {
    struct text *t = event("not_dead");
    put(t, ",\"for\":%" PRId64 ",\"pids\":", now - stop_state.since);
    put_tree(t);
    send_event();
    stop_state.report_at = now + 2 * (now - stop_state.since);
}

static void kill_round(void) {
    micros now = boottime();
    service.ending |= stop_state.reason != CAUSE_NONE;
    signal_group(SIGKILL);
    signal_tree(SIGKILL, 0, spared_service());
    stop_state.next = now + stop_state.pause;
    stop_state.pause = sooner(stop_state.pause * 2, 5 * SECOND);
    if (now >= stop_state.report_at)
        report_not_dead(now);
}

static bool unfinished(void) {
    const struct task *task = &spec.tasks[running.number];
    bool more = spec.hold || running.number + 1 < spec.task_count;
    return !boundary.end && (running.main || boundary.waiting || (more && task->cause == CAUSE_EXIT && task->code == 0));
}

/* Begin the stop sequence. The first reason stays; a later call can only move the kill to an earlier time. */
void stop(enum cause reason, const char *by, micros grace) {
    micros now = boottime();
    reap(); /* if the exit came first, the exit decides */
    if (!stop_state.reason && unfinished()) {
        stop_state.reason = reason;
        stop_state.by = by;
    }
    micros kill_at = later(now, grace);
    stop_state.kill_at = stop_state.stopping ? sooner(stop_state.kill_at, kill_at) : kill_at;
    if (stop_state.stopping || stop_state.killing)
        return;
    stop_state.stopping = true;
    if (!grace)
        return;
    struct text *t = event("signalled");
    put_field(t, "reason", CAUSES[stop_state.reason ? stop_state.reason : reason]);
    put_field(t, "by", by);
    put(t, ",\"grace\":%" PRId64, grace);
    send_event();
    ask_service_to_end();
    /* Processes outside the group first: when the group ends, their parents change during the search. */
    signal_tree(SIGTERM, running.main, spared_service());
    signal_group(SIGTERM);
    signal_group(SIGCONT);
}

/* Take the next step of the stop sequence, if it is due. */
void advance_stop(void) {
    micros now = boottime();
    if (stop_state.stopping && now >= stop_state.kill_at)
        start_killing();
    bool silent = running.out < 0 && running.err < 0;
    if (!running.main && !stop_state.stopping && (silent || now >= running.drain_until))
        start_killing();
    if (stop_state.killing && running.children_left && now >= stop_state.next)
        kill_round();
}

/* Return when the first time limit is reached, and which one it is. Limits apply to the main process of a task; its descendants are
 * killed soon after it ends anyway. */
micros limit_of(enum cause *reason) {
    struct task *task = &spec.tasks[running.number];
    static const enum cause reasons[] = {CAUSE_TIMED_OUT, CAUSE_TIMED_OUT, CAUSE_IDLE_TIMEOUT, CAUSE_STOP_AFTER};
    micros limits[] = {later(attempt_begun, spec.timeout), boundary.waiting ? NEVER : later(running.begun, task->timeout),
                       boundary.waiting ? NEVER : later(running.last_output, spec.idle_timeout), spec.stop_after};
    size_t first = 0;
    for (size_t i = 1; i < COUNT_OF(limits); i++)
        if (limits[i] < limits[first])
            first = i;
    *reason = reasons[first];
    return limits[first];
}

void check_limits(void) {
    enum cause reason;
    if (service.ended_unasked && !stop_state.stopping)
        stop(CAUSE_SERVICE_ENDED, "service", spec.stop_grace);
    if ((running.main || boundary.waiting) && !stop_state.stopping && boottime() >= limit_of(&reason))
        stop(reason, "limit", spec.stop_grace);
}
