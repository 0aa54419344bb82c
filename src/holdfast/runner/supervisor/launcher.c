/* Starts supervisors for one worker (--launch), which sends a message for each start over its end of our stdin, a socket. Each start
 * is a fork: the child makes the attempt's folder and becomes its supervisor, which saves the time of an exec. The parent reports the
 * ends of its children, with their exit record and a short log, so that the worker need not read files.
 *
 * The launcher keeps nothing that another process needs. When the worker ends, the socket closes and the launcher exits; supervisors
 * are in sessions of their own and run on. When the launcher is killed, the worker finds by the files what it had started. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "files.h"
#include "launch.h"
#include "launcher.h"
#include "proc.h"
#include "protocol.h"
#include "remove.h"
#include "supervise.h"

#define EXIT_ROOM 16384
#define NOT_INCLUDED UINT32_MAX
#define WORKER 3 /* the descriptor of the worker's socket */
#define POOL 4   /* that of the spare folders */

static struct {
    struct started_child {
        pid_t pid;
        uint64_t id;
        char *path;
    } *items;
    size_t count, room;
} children;

static struct {
    char *at; /* our command line, as `ps` shows it */
    size_t room;
} title;

static int spare_folders = -1;

static bool remember(pid_t pid, const struct launch *l) {
    char *path = strdup(l->path);
    if (!path || children.count == children.room) {
        size_t room = children.room ? children.room * 2 : 64;
        void *items = path ? realloc(children.items, room * sizeof *children.items) : NULL;
        if (!items) {
            free(path);
            return false;
        }
        children.items = items;
        children.room = room;
    }
    children.items[children.count++] = (struct started_child){.pid = pid, .id = l->id, .path = path};
    return true;
}

/* Show the folder in the command line of a supervisor, as if it had been started with it. */
static void show_folder(const char *path) {
    size_t program = strlen(title.at) + 1, length = strlen(path);
    if (program + length + 1 > title.room)
        return;
    memset(title.at + program, 0, title.room - program);
    memcpy(title.at + program, path, length);
}

static _Noreturn void become_launched_supervisor(const struct launch *l) {
    close_inherited(POOL + 1);
    note_launch(l->id);
    show_folder(l->path);
    prepare_supervisor();
    int error = make_attempt_folder(l, spare_folders);
    close_fd(&spare_folders);
    if (error)
        send_report(REPORT_FAILED, l->id, error);
    exit(error ? LEFT_BROKEN : supervise());
}

static bool launch(char *data, size_t length) {
    struct launch l;
    if (!parse_launch(data, length, &l))
        return false;
    pid_t pid = fork();
    if (pid == 0)
        become_launched_supervisor(&l);
    if (pid < 0)
        send_report(REPORT_FAILED, l.id, errno);
    else if (!remember(pid, &l))
        exit(LEFT_BROKEN); /* no memory: the worker takes over */
    return true;
}

/* Read a whole small file. Return its length, or NOT_INCLUDED. */
static uint32_t read_small(int at, const char *name, char *data, size_t room) {
    struct stat about;
    int fd = openat(at, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    ssize_t length = -1;
    if (fd >= 0 && fstat(fd, &about) == 0 && S_ISREG(about.st_mode) && about.st_size <= (off_t)room)
        length = read_fd(fd, data, (size_t)about.st_size);
    close_fd(&fd);
    return length < 0 ? NOT_INCLUDED : (uint32_t)length;
}

static bool is_empty_folder(int at, const char *name) {
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    DIR *entries = fd < 0 ? NULL : fdopendir(fd);
    if (!entries) {
        close_fd(&fd);
        return false;
    }
    bool empty = true;
    for (struct dirent *entry; empty && (entry = readdir(entries));)
        empty = strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0;
    closedir(entries);
    return empty;
}

/* Return whether the child left neither a report nor anything in its output folder. */
static bool left_nothing(int at) {
    struct stat about;
    int work = openat(at, "work", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    bool nothing = work >= 0 && fstatat(work, "result.json", &about, AT_SYMLINK_NOFOLLOW) < 0 && errno == ENOENT && is_empty_folder(work, "output");
    close_fd(&work);
    return nothing;
}

/* Wait while the worker does not read: it sends no starts meanwhile either. */
static void report_end(const struct started_child *child, int status) {
    static char packet[sizeof(struct report_head) + EXIT_ROOM + MAX_REPORTED_LOG];
    struct report_head head = {.kind = REPORT_ENDED, .id = child->id, .exit_length = NOT_INCLUDED, .log_length = NOT_INCLUDED};
    head.number = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    size_t used = sizeof head;
    int at = open(child->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (at >= 0) {
        head.exit_length = read_small(at, "exit", packet + used, EXIT_ROOM);
        used += head.exit_length == NOT_INCLUDED ? 0 : head.exit_length;
        head.log_length = head.exit_length == NOT_INCLUDED ? NOT_INCLUDED : read_small(at, "log", packet + used, MAX_REPORTED_LOG);
        used += head.log_length == NOT_INCLUDED ? 0 : head.log_length;
        head.nothing_left = left_nothing(at);
        close(at);
    }
    memcpy(packet, &head, sizeof head);
    while (send(worker, packet, used, MSG_NOSIGNAL) < 0 && errno == EINTR)
        ;
}

static void reap_children(void) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
        for (size_t i = 0; i < children.count; i++)
            if (children.items[i].pid == pid) {
                struct started_child ended = children.items[i];
                children.items[i] = children.items[--children.count];
                report_end(&ended, status);
                free(ended.path);
                break;
            }
}

static int watch_children(void) {
    sigset_t all, awaited;
    signal(SIGCHLD, SIG_DFL); /* if it were ignored, the kernel would reap our children */
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    sigemptyset(&awaited);
    sigaddset(&awaited, SIGCHLD);
    return signalfd(-1, &awaited, SFD_CLOEXEC | SFD_NONBLOCK);
}

/* Without spare folders each attempt gets a new one. */
static void open_spare_folders(const char *path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    spare_folders = fd < 0 ? -1 : fd == POOL ? fd : dup3(fd, POOL, O_CLOEXEC);
    if (fd != POOL)
        close_fd(&fd);
}

static bool take_socket(void) {
    worker = dup2(STDIN_FILENO, WORKER);
    close_inherited(WORKER + 1);
    close(STDIN_FILENO);
    open_standard_descriptors();
    return worker == WORKER && fcntl(worker, F_SETFD, FD_CLOEXEC) == 0;
}

/* Serve until the worker closes its end. Signals are blocked: a terminal sends them to the whole group of the worker. */
int run_launcher(int argc, char **argv) {
    static char data[MAX_LAUNCH + 1];
    title.at = argv[0];
    title.room = (size_t)(argv[argc - 1] + strlen(argv[argc - 1]) + 1 - argv[0]);
    bool taken = take_socket();
    open_spare_folders(argv[2]);
    boot_id();
    int signals = taken ? watch_children() : -1;
    if (signals < 0 || setsid() < 0 || chdir("/") < 0)
        return LEFT_BROKEN;
    struct pollfd polled[] = {{.fd = worker, .events = POLLIN}, {.fd = signals, .events = POLLIN}};
    for (;;) {
        struct signalfd_siginfo info;
        poll(polled, 2, -1);
        while (read(signals, &info, sizeof info) == sizeof info)
            ;
        reap_children();
        if (!polled[0].revents)
            continue;
        ssize_t length = recv(worker, data, sizeof data - 1, MSG_DONTWAIT | MSG_TRUNC);
        if (length < 0 && (errno == EAGAIN || errno == EINTR))
            continue;
        if (length <= 0)
            return 0;
        if ((size_t)length >= sizeof data || !launch(data, (size_t)length))
            return LEFT_USAGE;
    }
}
