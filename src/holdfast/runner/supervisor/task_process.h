/* The process of the task that runs. */
#ifndef TASK_PROCESS_H
#define TASK_PROCESS_H

#include <stdbool.h>
#include <sys/types.h>

#include "clock.h"
#include "spec.h"

extern struct running {
    unsigned number; /* of the task, from 0 */
    pid_t main;      /* leader of its session and group; 0 once it was reaped */
    int go, report, out, err;
    bool children_left;
    micros begun, last_output, drain_until, rest_until[3];
} running;

bool fork_child(struct task *task);
void release_child(struct task *task);
void dismiss_child(void);
void read_report(void);
void close_task(void);
bool reap(void);

#endif
