/* Turns a forked child into its program: descriptors, limits, user, environment, exec. Everything here runs in the child,
 * except describe_report. The private view of the host is in private_view.c. The fork, and what the parent does after it, is
 * in task_process.c and service.c. */
#define _GNU_SOURCE
#include <errno.h>
#include <grp.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "attempt.h"
#include "child.h"
#include "private_view.h"

enum step { STEP_DESCRIPTORS, STEP_LIMITS, STEP_PRIVATE, STEP_GROUPS, STEP_GID, STEP_UID, STEP_PRIVILEGES, STEP_CWD, STEP_EXEC };
static const char *const STEPS[] = {"set up its descriptors", "set its limits",     "give it a private view of the host",
                                    "set its groups",         "set its group",      "set its user",
                                    "give up privileges",     "enter its folder",   "run it"};

static _Noreturn void give_up(int report, enum step step, int error) {
    struct report r = {.step = (int)step, .error = error};
    (void)!write(report, &r, sizeof r);
    _exit(ENDED_UNSTARTED);
}

/* Describe in `failure` what the child could not do. Return false if the report is not valid. */
bool describe_report(const struct report *r, const char *program) {
    if (r->step < 0 || r->step > STEP_EXEC)
        return false;
    snprintf(failure, sizeof failure, "cannot start %.200s: could not %s: %s", program, STEPS[r->step], strerror(r->error));
    return true;
}

/* Use the system call: the C library does not allow changes to its two internal signals, and exec would inherit them ignored. */
static void default_signals(void) {
    static const unsigned char defaults[64];
    for (int i = 1; i <= 64; i++)
        syscall(SYS_rt_sigaction, i, defaults, NULL, 8);
}

static void drop_privileges(int report) {
    uid_t r, e, s;
    gid_t rg, eg, sg;
    if ((spec.uid >= 0 || spec.gid >= 0) && geteuid() == 0 && setgroups(spec.group_count, spec.groups) < 0)
        give_up(report, STEP_GROUPS, errno);
    if (spec.gid >= 0) {
        gid_t gid = (gid_t)spec.gid;
        if (setresgid(gid, gid, gid) < 0 || getresgid(&rg, &eg, &sg) < 0)
            give_up(report, STEP_GID, errno);
        if (rg != gid || eg != gid || sg != gid)
            give_up(report, STEP_GID, EPERM);
    }
    if (spec.uid >= 0) {
        uid_t uid = (uid_t)spec.uid;
        if (setresuid(uid, uid, uid) < 0 || getresuid(&r, &e, &s) < 0)
            give_up(report, STEP_UID, errno);
        if (r != uid || e != uid || s != uid || (uid && setuid(0) == 0))
            give_up(report, STEP_UID, EPERM);
    }
    if (spec.no_new_privs && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        give_up(report, STEP_PRIVILEGES, errno);
}

static void set_limits(int report) {
    for (size_t i = 0; i < LIMIT_COUNT; i++) {
        struct rlimit limit = {.rlim_cur = spec.limits[i], .rlim_max = spec.limits[i]};
        if (spec.limited[i] && setrlimit((__typeof__(RLIMIT_AS))LIMITS[i].resource, &limit) < 0)
            give_up(report, STEP_LIMITS, errno);
    }
}

static bool same_key(const char *a, const char *b) {
    size_t length = (size_t)(strchr(a, '=') - a) + 1;
    return strncmp(a, b, length) == 0;
}

static bool overridden(const char *entry, const struct strings *by) {
    for (size_t i = 0; i < by->count; i++)
        if (same_key(entry, by->items[i]))
            return true;
    return same_key(entry, "HOLDFAST_MARK=");
}

/* Build the environment from scratch: the entries of the spec, overridden by those of the task, and HOLDFAST_MARK. */
static char **build_environment(const struct task *task) {
    static const struct strings none;
    char *mark = malloc(strlen(spec.mark) + sizeof "HOLDFAST_MARK=");
    struct strings env = {0};
    bool whole = mark != NULL;
    for (size_t i = 0; whole && i < spec.env.count; i++)
        whole = overridden(spec.env.items[i], &task->env) || push(&env, spec.env.items[i]);
    for (size_t i = 0; whole && i < task->env.count; i++)
        whole = overridden(task->env.items[i], &none) || push(&env, task->env.items[i]);
    if (!whole)
        return NULL;
    sprintf(mark, "HOLDFAST_MARK=%s", spec.mark);
    return push(&env, mark) ? env.items : NULL;
}

static const char *search_path(char **env) {
    for (; *env; env++)
        if (strncmp(*env, "PATH=", 5) == 0)
            return *env + 5;
    return "/usr/local/bin:/usr/bin:/bin";
}

/* Like execvpe, but never runs a shell for a file of unknown format, and behaves the same with every C library. Return errno. */
static int execute(char **argv, char **env) {
    char path[PATH_MAX];
    int error = ENOENT;
    if (strchr(argv[0], '/') || !*argv[0]) {
        execve(argv[0], argv, env);
        return errno;
    }
    for (const char *at = search_path(env); at; at = strchr(at, ':') ? strchr(at, ':') + 1 : NULL) {
        int length = (int)strcspn(at, ":");
        if (!length || snprintf(path, sizeof path, "%.*s/%s", length, at, argv[0]) >= (int)sizeof path)
            continue;
        execve(path, argv, env);
        if (errno == EACCES)
            error = EACCES;
        else if (errno != ENOENT && errno != ENOTDIR)
            return errno;
    }
    return error;
}

static void die_with_parent(pid_t parent) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(ENDED_UNSTARTED);
}

static void wait_for_go(const struct child_fds *fds) {
    char byte;
    close(fds->go_writer); /* close the parent's end, or we would not notice its death */
    if (read(fds->go, &byte, 1) != 1)
        _exit(ENDED_UNSTARTED);
}

_Noreturn void become_child(const struct task *task, pid_t parent, const struct child_fds *fds) {
    int report = fds->report;
    setsid();
    die_with_parent(parent);
    close(lock_fd);
    if (fds->go >= 0)
        wait_for_go(fds);
    if (dup2(fds->in, 0) < 0 || dup2(fds->out, 1) < 0 || dup2(fds->err, 2) < 0)
        give_up(report, STEP_DESCRIPTORS, errno);
    if (spec.private_view && !enter_private_view()) /* before the limits: a limit on file sizes would apply here too */
        give_up(report, STEP_PRIVATE, errno);
    set_limits(report);
    drop_privileges(report);
    die_with_parent(parent); /* again: the change of user cleared it */
    umask((mode_t)spec.umask);
    const char *cwd = task->cwd ? task->cwd : spec.cwd ? spec.cwd : "/";
    if (chdir(cwd) < 0)
        give_up(report, STEP_CWD, errno);
    char **env = build_environment(task);
    if (!env)
        give_up(report, STEP_EXEC, ENOMEM);
    sigset_t none;
    sigemptyset(&none);
    default_signals();
    sigprocmask(SIG_SETMASK, &none, NULL);
    give_up(report, STEP_EXEC, execute(task->argv.items, env));
}
