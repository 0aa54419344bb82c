/* Finds and signals our descendants, and kills all processes of a user. stop.c decides when and why.
 *
 * "No child left" (ECHILD) means that no descendant is left, because this program is their subreaper. A pid is signalled only while
 * it cannot have been reused: unreaped children directly, other descendants by pidfd. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "files.h"
#include "proc.h"
#include "process_tree.h"

/* For headers older than the kernel; the numbers are the same on every machine. */
#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

#define MAX_TREE 65536u
#define MAX_LISTED 100

struct member {
    pid_t pid, parent;
};

static struct {
    struct member *items;
    size_t count, room;
    pid_t spare; /* this child and its descendants are left out */
} tree;

static void add_member(pid_t pid, pid_t parent) {
    if (tree.spare && pid == tree.spare)
        return;
    if (tree.count == tree.room && tree.count < MAX_TREE) {
        size_t room = tree.room ? tree.room * 2 : 64;
        struct member *items = realloc(tree.items, room * sizeof *items);
        if (!items)
            return;
        tree.items = items;
        tree.room = room;
    }
    if (tree.count < tree.room)
        tree.items[tree.count++] = (struct member){.pid = pid, .parent = parent};
}

static bool add_children_of_thread(pid_t parent, const char *thread) {
    char path[80], data[1024];
    snprintf(path, sizeof path, "/proc/%d/task/%.20s/children", parent, thread);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    pid_t pid = 0;
    for (ssize_t n; (n = read_fd(fd, data, sizeof data)) > 0;)
        for (ssize_t i = 0; i < n; i++)
            if (data[i] >= '0' && data[i] <= '9') {
                pid = pid * 10 + (data[i] - '0');
            } else if (pid) {
                add_member(pid, parent);
                pid = 0;
            }
    close(fd);
    return true;
}

static void add_children(pid_t parent) {
    char path[40];
    snprintf(path, sizeof path, "/proc/%d/task", parent);
    DIR *threads = opendir(path);
    if (!threads)
        return;
    for (struct dirent *entry; (entry = readdir(threads));)
        if (entry->d_name[0] != '.')
            add_children_of_thread(parent, entry->d_name);
    closedir(threads);
}

/* For kernels without `children` files: find only direct children. Others become our children when their parents end. */
static void add_own_children_by_scan(void) {
    DIR *proc = opendir("/proc");
    struct stat_line line;
    uint64_t pid;
    if (!proc)
        return;
    for (struct dirent *entry; (entry = readdir(proc));)
        if (parse_number(entry->d_name, INT_MAX, &pid) && read_stat((pid_t)pid, &line) && line.parent == getpid())
            add_member((pid_t)pid, getpid());
    closedir(proc);
}

static void collect_children(pid_t spare) {
    char self[20];
    snprintf(self, sizeof self, "%d", getpid());
    tree.count = 0;
    tree.spare = spare;
    if (!add_children_of_thread(getpid(), self))
        add_own_children_by_scan();
}

/* Return whether any child other than the spared one is alive. The list may miss one while another ends, so read an empty one twice. */
bool others_left(pid_t spare) {
    collect_children(spare);
    if (!tree.count)
        collect_children(spare);
    return tree.count > 0;
}

static void collect_tree(pid_t spare) {
    collect_children(spare);
    for (size_t i = 0; i < tree.count; i++)
        add_children(tree.items[i].pid);
}

/* The pid of our own child cannot be reused before we reap it. For others, open a pidfd, then check that the process is still the
 * one we found. One whose parent changed in between is signalled in the next round. */
static void signal_member(const struct member *m, int sig) {
    struct stat_line line;
    if (m->parent == getpid()) {
        kill(m->pid, sig);
        return;
    }
    int fd = (int)syscall(SYS_pidfd_open, m->pid, 0);
    if (fd < 0)
        return;
    if (read_stat(m->pid, &line) && line.parent == m->parent)
        syscall(SYS_pidfd_send_signal, fd, sig, NULL, 0);
    close(fd);
}

void signal_tree(int sig, pid_t except_group, pid_t spare) {
    struct stat_line line;
    collect_tree(spare);
    for (size_t i = 0; i < tree.count; i++)
        if (!except_group || (read_stat(tree.items[i].pid, &line) && line.group != except_group))
            signal_member(&tree.items[i], sig);
}

/* List the pids of the last search. */
void put_tree(struct text *t) {
    put(t, "[");
    for (size_t i = 0; i < tree.count && i < MAX_LISTED; i++)
        put(t, "%s%d", i ? "," : "", tree.items[i].pid);
    put(t, "]");
}

static bool may_kill_others(void) {
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2];
    return syscall(SYS_capget, &header, data) < 0 || data[0].effective & (1u << CAP_KILL);
}

/* Kill all processes of a user and nothing else, even if we have too many privileges. No process can escape by forking, because the
 * kernel signals all of them in one call. */
bool kill_user(uid_t uid) {
    uid_t r, e, s;
    if (!uid || setresuid(uid, uid, 0) < 0)
        return false;
    bool safe = getresuid(&r, &e, &s) == 0 && r == uid && e == uid && !may_kill_others();
    if (safe)
        kill(-1, SIGKILL);
    return setresuid(0, 0, 0) == 0 && safe;
}
