/* The content of `spec`, and the progress of each task. Implemented in spec.c. */
#ifndef SPEC_H
#define SPEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

#include "clock.h"
#include "protocol.h"
#include "text.h"

struct task {
    char *name, *cwd;
    struct strings argv, env;
    micros timeout;
    /* Its progress. */
    bool begun, ended;
    enum cause cause;
    int code, signal;
    micros started_at, ended_at;
};

struct limit {
    const char *name;
    int resource;
};
extern const struct limit LIMITS[]; /* LIMIT_COUNT of them */

extern struct spec {
    uint64_t token, cap;
    char *mark, *cwd;
    struct strings env;
    int64_t uid, gid;
    gid_t groups[64];
    size_t group_count;
    int umask;
    bool no_new_privs, wall_clock, hold, sole_user, private_view;
    bool limited[LIMIT_COUNT];
    rlim_t limits[LIMIT_COUNT];
    micros timeout, idle_timeout, stop_grace, drain, start_by, stop_after;
    struct task *tasks, service;
    size_t task_count;
    int64_t stop_signal; /* the signal that asks the service to end */
} spec;

bool read_spec(void);

#endif
