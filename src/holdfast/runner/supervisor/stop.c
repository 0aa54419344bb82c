/* The stop sequence: ask, wait, kill everything, until nothing is left; and the limits of time that begin it. Who is signalled is
 * in process_tree.c.
 *
 * A reason that we signalled for before the child ended is the cause; otherwise the child's own end is. */
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

/* A group is signalled only while its leader is unreaped: after that its number may be anybody's. */
static void signal_group(int sig) {
    if (running.main && kill(-running.main, sig) < 0 && errno == ESRCH)
        kill(running.main, sig); /* it has not made its group yet */
}

void start_killing(void) {
    micros now = boottime();
    if (stop_state.killing)
        return;
    stop_state.killing = true;
    stop_state.since = stop_state.next = now;
    stop_state.pause = 2 * MS;
    stop_state.tell_at = later(now, NOT_DEAD_AFTER);
    if (!running.children_left)
        return;
    stop_state.killed = true;
    put_field(event("killed"), "reason", stop_state.reason ? CAUSES[stop_state.reason] : "leftovers");
    send_event();
}

static void tell_not_dead(micros now) {
    struct text *t = event("not_dead");
    put(t, ",\"for\":%" PRId64 ",\"pids\":", now - stop_state.since);
    put_tree(t);
    send_event();
    stop_state.tell_at = now + 2 * (now - stop_state.since);
}

static void kill_round(void) {
    micros now = boottime();
    service.ending |= stop_state.reason != CAUSE_NONE;
    signal_group(SIGKILL);
    signal_tree(SIGKILL, 0, spared_service());
    stop_state.next = now + stop_state.pause;
    stop_state.pause = sooner(stop_state.pause * 2, 5 * SECOND);
    if (now >= stop_state.tell_at)
        tell_not_dead(now);
}

static bool unfinished(void) {
    const struct task *task = &spec.tasks[running.number];
    bool more = spec.hold || running.number + 1 < spec.task_count;
    return !held.end && (running.main || held.on || (more && task->cause == CAUSE_EXIT && task->code == 0));
}

/* Stop for a reason. The first one stays; a later one can only bring the kill forward. */
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
    /* Those outside of the group first: once the group ends, they change their parent while we look for them. */
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

/* Return when the first limit is reached, and which it is. Limits hold for the child; what it leaves behind is not waited for anyway. */
micros limit_of(enum cause *reason) {
    struct task *task = &spec.tasks[running.number];
    static const enum cause reasons[] = {CAUSE_TIMED_OUT, CAUSE_TIMED_OUT, CAUSE_IDLE_TIMEOUT, CAUSE_STOP_AFTER};
    micros limits[] = {later(attempt_begun, spec.timeout), held.on ? NEVER : later(running.begun, task->timeout),
                       held.on ? NEVER : later(running.last_output, spec.idle_timeout), spec.stop_after};
    size_t first = 0;
    for (size_t i = 1; i < COUNT_OF(limits); i++)
        if (limits[i] < limits[first])
            first = i;
    *reason = reasons[first];
    return limits[first];
}

void check_limits(void) {
    enum cause reason;
    if (service.fell && !stop_state.stopping)
        stop(CAUSE_SERVICE_ENDED, "service", spec.stop_grace);
    if ((running.main || held.on) && !stop_state.stopping && boottime() >= limit_of(&reason))
        stop(reason, "limit", spec.stop_grace);
}
