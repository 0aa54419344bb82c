/* Reads /proc and /sys/fs/cgroup: the status of a process, the boot id, and how often the memory limit of our control group has
 * killed. The search for descendants is in process_tree.c. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "files.h"
#include "proc.h"

static uint64_t oom_before;

bool read_stat(pid_t pid, struct stat_line *out) {
    char path[40], line[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    if (!read_text(path, line, sizeof line))
        return false;
    char *after = strrchr(line, ')'); /* the name may contain anything */
    return after && sscanf(after + 1, " %*c %d %d %d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %" SCNu64, &out->parent,
                           &out->group, &out->session, &out->start_ticks) == 4;
}

/* It is read once; a launcher reads it for all supervisors that it forks. */
const char *boot_id(void) {
    static char id[64];
    if (!*id && !read_text("/proc/sys/kernel/random/boot_id", id, sizeof id))
        *id = 0;
    id[strcspn(id, "\n")] = 0;
    return id;
}

static uint64_t counter_in(const char *path) {
    char data[1024];
    if (!read_text(path, data, sizeof data))
        return UINT64_MAX;
    char *at = strstr(data, "oom_kill ");
    return at ? strtoull(at + 9, NULL, 10) : UINT64_MAX;
}

/* Return how often the memory limit of our control group (version 1 or 2) has killed; a container may see its group as the root. */
static uint64_t oom_kills(void) {
    char groups[4096], path[4096 + 64];
    if (!read_text("/proc/self/cgroup", groups, sizeof groups))
        return 0;
    for (char *save = NULL, *line = strtok_r(groups, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char *first = strchr(line, ':'), *second = first ? strchr(first + 1, ':') : NULL;
        if (!second)
            continue;
        *second = 0;
        bool unified = strcmp(first + 1, "") == 0;
        if (!unified && strcmp(first + 1, "memory") != 0)
            continue;
        const char *root = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory", *file = unified ? "memory.events" : "memory.oom_control";
        snprintf(path, sizeof path, "%s%s/%s", root, second + 1, file);
        uint64_t count = counter_in(path);
        if (count == UINT64_MAX) {
            snprintf(path, sizeof path, "%s/%s", root, file);
            count = counter_in(path);
        }
        if (count != UINT64_MAX)
            return count;
    }
    return 0;
}

void count_oom_kills(void) { oom_before = oom_kills(); }

uint64_t new_oom_kills(void) {
    uint64_t kills = oom_kills();
    return kills > oom_before ? kills - oom_before : 0;
}
