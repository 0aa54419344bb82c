/* The process of the running task. Implemented in task_process.c. */
#ifndef TASK_PROCESS_H
#define TASK_PROCESS_H

#include <stdbool.h>
#include <sys/types.h>

#include "clock.h"
#include "spec.h"

extern struct running {
    unsigned number; /* index of the task, from 0 */
    pid_t main;      /* its main process, leader of its session and group; 0 once reaped */
    int go, report, out, err;
    bool children_left;
    micros begun, last_output, drain_until, read_after[3];
} running;

bool fork_child(struct task *task);
void release_child(struct task *task);
void discard_child(void);
void read_report(void);
void close_task(void);
bool reap(void);

#endif
