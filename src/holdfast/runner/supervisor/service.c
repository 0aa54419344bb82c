/* Starts the service, asks it to end, and records its end. commands.c and tasks.c decide when it ends. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "attempt.h"
#include "child.h"
#include "files.h"
#include "log.h"
#include "service.h"
#include "spec.h"
#include "task_process.h"

struct service service;

static int open_service_log(void) {
    return openat(folder, "service", O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
}

/* Start the service, and wait until its program runs or has failed to start. */
const char *start_service(void) {
    if (service.pid)
        return service.asked ? "it is about to end" : NULL;
    int report[2] = {-1, -1}, out = open_service_log(), in = open("/dev/null", O_RDONLY | O_CLOEXEC);
    pid_t parent = getpid(), pid = -1;
    struct report r = {.step = -1};
    if (in >= 0 && out >= 0 && !pipe2(report, O_CLOEXEC) && (pid = fork()) == 0) {
        struct child_fds fds = {.go = -1, .go_writer = -1, .report = report[1], .in = in, .out = out, .err = out};
        become_child(&spec.service, parent, &fds);
    }
    int error = errno;
    close_fd(&in);
    close_fd(&out);
    close_fd(&report[1]);
    service.asked = service.ended_unasked = false;
    service.pid = pid > 0 ? pid : 0;
    if (pid > 0 && read_fd(report[0], (char *)&r, sizeof r) == sizeof r)
        describe_report(&r, spec.service.argv.items[0]);
    close_fd(&report[0]);
    if (pid < 0) {
        snprintf(failure, sizeof failure, "cannot start a process: %s", strerror(error));
        service.ended_unasked = true;
        return failure;
    }
    running.children_left = true;
    if (*failure)
        return failure;
    struct text *t = event("service_started");
    put_field(t, "name", spec.service.name);
    put(t, ",\"pid\":%d", pid);
    send_event();
    return NULL;
}

void ask_service_to_end(void) {
    if (service.pid && !service.asked)
        kill(service.pid, (int)spec.stop_signal);
    service.asked = true;
}

/* Record the end of the service. If it was not asked to end, the attempt ends too. */
void service_ended(int status) {
    struct text *t = event("service_ended");
    put(t, WIFEXITED(status) ? ",\"code\":%d" : ",\"signal\":%d", WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
    put(t, ",\"asked\":%s", service.asked ? "true" : "false");
    send_event();
    service.pid = 0;
    service.ended_unasked = !service.asked;
    if (service.ended_unasked && !*failure)
        snprintf(failure, sizeof failure, "%.64s ended by itself, %s %d", spec.service.name, WIFEXITED(status) ? "exit code" : "signal",
                 WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
}
