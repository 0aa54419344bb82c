/* The child between fork and exec. Implemented in child.c. */
#ifndef CHILD_H
#define CHILD_H

#include <stdbool.h>
#include <sys/types.h>

#include "spec.h"

/* What a child writes to the pipe `report` when it cannot start its program. A successful exec closes the pipe. */
struct report {
    int step, error;
};

/* A task reads `go` and waits there until it may begin; `go_writer` is the parent's end. A service has neither. */
struct child_fds {
    int go, go_writer, report, in, out, err;
};

_Noreturn void become_child(const struct task *task, pid_t parent, const struct child_fds *fds);
bool describe_report(const struct report *r, const char *program);

#endif
