/* Waits for the next signal, output, command or deadline. What follows is in tasks.c. */
#define _GNU_SOURCE
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "clock.h"
#include "commands.h"
#include "log.h"
#include "loop.h"
#include "output.h"
#include "spec.h"
#include "stop.h"
#include "task_process.h"
#include "tasks.h"
#include "text.h"

static int signals = -1;

void prepare_signals(void) {
    static const int OWN_FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP};
    sigset_t blocked, awaited;
    struct sigaction action = {.sa_handler = SIG_DFL};
    sigaction(SIGCHLD, &action, NULL); /* if we inherited it as ignored, the kernel would reap our children */
    sigfillset(&blocked);
    for (size_t i = 0; i < COUNT_OF(OWN_FAULTS); i++)
        sigdelset(&blocked, OWN_FAULTS[i]);
    sigprocmask(SIG_SETMASK, &blocked, NULL);
    sigemptyset(&awaited);
    sigaddset(&awaited, SIGCHLD);
    sigaddset(&awaited, SIGTERM);
    sigaddset(&awaited, SIGINT);
    sigaddset(&awaited, SIGIO);
    signals = signalfd(-1, &awaited, SFD_CLOEXEC | SFD_NONBLOCK);
}

static micros next_deadline(void) {
    enum cause ignored;
    micros at = next_poll;
    if ((running.main || boundary.waiting) && !stop_state.stopping)
        at = sooner(at, limit_of(&ignored));
    if (stop_state.stopping && !stop_state.killing)
        at = sooner(at, stop_state.kill_at);
    if (!running.main && !boundary.waiting && !stop_state.stopping && !stop_state.killing)
        at = sooner(at, running.drain_until);
    if (stop_state.killing && running.children_left)
        at = sooner(at, stop_state.next);
    for (int stream = OUT; stream <= ERR; stream++)
        if (!may_read(stream))
            at = sooner(at, running.read_after[stream]);
    return at;
}

/* Return whether the folder of commands has changed. */
static bool read_signals(void) {
    struct signalfd_siginfo info;
    bool noticed = false;
    while (read(signals, &info, sizeof info) == sizeof info) {
        if (info.ssi_signo == SIGTERM || info.ssi_signo == SIGINT)
            stop(CAUSE_INTERRUPTED, "signal", spec.stop_grace);
        noticed |= info.ssi_signo == SIGIO;
    }
    return noticed;
}

/* Sleep until something happens or a deadline passes. Return whether there may be a new command. */
bool wait_for_activity(void) {
    bool reading = copy_has_room();
    struct pollfd polled[] = {{.fd = signals, .events = POLLIN},
                              {.fd = reading && may_read(OUT) ? running.out : -1, .events = POLLIN},
                              {.fd = reading && may_read(ERR) ? running.err : -1, .events = POLLIN},
                              {.fd = copy_pending() ? STDOUT_FILENO : -1, .events = POLLOUT}};
    micros now = boottime(), due = next_deadline();
    micros wait = due <= now ? 0 : sooner((due - now + 999) / 1000, 1000);
    poll(polled, COUNT_OF(polled), (int)wait);
    if (polled[3].revents)
        flush_copy();
    reap(); /* before the signals and commands: if the exit came first, the exit decides */
    return polled[0].revents && read_signals();
}
