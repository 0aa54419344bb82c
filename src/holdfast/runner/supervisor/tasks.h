/* The tasks of the attempt, one after the other. Implemented in tasks.c. */
#ifndef TASKS_H
#define TASKS_H

#include <stdbool.h>

#include "clock.h"

/* A task boundary: before the first task, between two tasks, or after the last. */
extern struct boundary {
    bool waiting;  /* no task runs, and we wait for a command */
    bool go, end;  /* the command that we received */
    unsigned next; /* index of the next task, from 0; the number of tasks if there is none */
} boundary;

extern micros attempt_begun, attempt_begun_at; /* on CLOCK_BOOTTIME, and on the wall clock */

int run_tasks(void);

#endif
