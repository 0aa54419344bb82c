/* Forks the process of a task, lets it run or discards it, reads its report of a failed start, and reaps all processes that end.
 * The steps of the child before exec are in child.c, its output is read in output.c, the order of the tasks is in tasks.c. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "attempt.h"
#include "child.h"
#include "files.h"
#include "log.h"
#include "proc.h"
#include "process_tree.h"
#include "service.h"
#include "stop.h"
#include "task_process.h"

struct running running = {.go = -1, .report = -1, .out = -1, .err = -1};

static int open_stdin(void) {
    int fd = openat(folder, "stdin", O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    return fd >= 0 ? fd : open("/dev/null", O_RDONLY | O_CLOEXEC);
}

void close_task(void) {
    close_fd(&running.go);
    close_fd(&running.report);
    close_fd(&running.out);
    close_fd(&running.err);
}

/* Fork the child. It waits for `go` before it does anything else. */
bool fork_child(struct task *task) {
    int go[2] = {-1, -1}, report[2] = {-1, -1}, out[2] = {-1, -1}, err[2] = {-1, -1}, in = open_stdin();
    pid_t parent = getpid(), pid = -1;
    if (in >= 0 && !pipe2(go, O_CLOEXEC) && !pipe2(report, O_CLOEXEC) && !pipe2(out, O_CLOEXEC) && !pipe2(err, O_CLOEXEC)) {
        struct child_fds fds = {.go = go[0], .go_writer = go[1], .report = report[1], .in = in, .out = out[1], .err = err[1]};
        pid = fork();
        if (pid == 0)
            become_child(task, parent, &fds);
    }
    int error = errno;
    running.report = report[0];
    running.go = go[1];
    running.out = out[0];
    running.err = err[0];
    close_fd(&in);
    close_fd(&go[0]);
    close_fd(&report[1]);
    close_fd(&out[1]);
    close_fd(&err[1]);
    if (pid < 0) {
        snprintf(failure, sizeof failure, "cannot start a process: %s", strerror(error));
        close_task();
        return false;
    }
    fcntl(running.report, F_SETFL, O_NONBLOCK);
    fcntl(running.out, F_SETFL, O_NONBLOCK);
    fcntl(running.err, F_SETFL, O_NONBLOCK);
    running.main = pid;
    running.children_left = true;
    return true;
}

/* Discard a child that must not run: without `go` it exits. */
void discard_child(void) {
    close_task();
    if (running.main) {
        kill(running.main, SIGKILL);
        waitpid(running.main, NULL, 0);
    }
    running.main = 0;
    running.children_left = false;
}

void release_child(struct task *task) {
    running.begun = running.last_output = boottime();
    task->begun = true;
    task->started_at = walltime();
    struct stat_line line = {0};
    read_stat(running.main, &line);
    struct text *t = event("task_started");
    put_field(t, "name", task->name);
    put(t, ",\"pid\":%d,\"start_ticks\":%" PRIu64, running.main, line.start_ticks);
    send_event();
    write_all(running.go, "g", 1);
    close_fd(&running.go);
}

/* Read the report pipe: exec has closed it, or it contains the failure. */
void read_report(void) {
    struct report r;
    struct task *task = &spec.tasks[running.number];
    if (running.report < 0)
        return;
    ssize_t n = read(running.report, &r, sizeof r);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n == sizeof r && describe_report(&r, task->argv.items[0]))
        task->cause = CAUSE_START_FAILED;
    close_fd(&running.report);
}

static void main_ended(int status) {
    struct task *task = &spec.tasks[running.number];
    read_report();
    running.main = 0;
    running.drain_until = later(boottime(), spec.drain);
    task->ended = true;
    task->ended_at = walltime();
    task->code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    task->signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    if (task->cause == CAUSE_START_FAILED)
        task->code = -1;
    else if (stop_state.reason)
        task->cause = stop_state.reason;
    else if ((task->signal == SIGKILL || task->code == 128 + SIGKILL) && new_oom_kills())
        task->cause = CAUSE_OUT_OF_MEMORY;
    else
        task->cause = CAUSE_EXIT;
}

/* Reap all processes that have ended. Return whether there were any. */
bool reap(void) {
    bool any = false;
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, WNOHANG | __WALL);
        if (pid < 0 && errno == EINTR)
            continue;
        if (pid <= 0) {
            running.children_left = pid == 0 && (!service.pid || service.ending || others_left(spared_service()));
            break;
        }
        any = true;
        if (pid == running.main)
            main_ended(status);
        if (pid == service.pid)
            service_ended(status);
    }
    if (any && stop_state.killing)
        stop_state.next = boottime(); /* its children are ours now */
    return any;
}
