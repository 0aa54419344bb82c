/* A start: makes the attempt's folder, and reports to the worker. Implemented in launch.c. */
#ifndef LAUNCH_H
#define LAUNCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "clock.h"

struct launch {
    uint64_t id; /* the worker's number for this start */
    micros start_by;
    char *path;  /* of the folder */
    char *claim; /* the link that claims `uid` for it */
    bool own;    /* `uid` belongs to this attempt alone */
    int64_t uid, gid;
    char *spec, *request, *input, *limits, *secrets;
};

/* The head of a report. The exit record and the log follow it. The worker's side is in runner/launcher.py. */
struct report_head {
    uint32_t kind, nothing_left;
    uint64_t id;
    int64_t number;
    uint32_t exit_length, log_length;
};

extern int worker; /* the socket of the worker; -1 if there is none */

bool parse_launch(char *data, size_t length, struct launch *l);
int make_attempt_folder(const struct launch *l, int pool);
void send_report(uint32_t kind, uint64_t id, int64_t number);
void note_launch(uint64_t id);
void report_begun(void);

#endif
