/* The child between fork and exec. */
#ifndef CHILD_H
#define CHILD_H

#include <stdbool.h>
#include <sys/types.h>

#include "spec.h"

/* What a child writes into `report` before it gives up; exec closes that pipe. */
struct report {
    int step, error;
};

/* `go` is where a task waits until it may begin, `go_writer` the parent's end of it; a service has neither. */
struct child_fds {
    int go, go_writer, report, in, out, err;
};

_Noreturn void become_child(const struct task *task, pid_t parent, const struct child_fds *fds);
bool describe_report(const struct report *r, const char *program);

#endif
