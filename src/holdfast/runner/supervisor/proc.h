/* The status of a process, the boot id, and kills by the memory limit of our control group. Implemented in proc.c. */
#ifndef PROC_H
#define PROC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct stat_line {
    pid_t parent, group, session;
    uint64_t start_ticks;
};

bool read_stat(pid_t pid, struct stat_line *out);
const char *boot_id(void);
void count_oom_kills(void);
uint64_t new_oom_kills(void); /* since count_oom_kills was called */

#endif
