/* The service: a program that runs along with the tasks of a pipeline, started and stopped by command. Implemented in service.c. */
#ifndef SERVICE_H
#define SERVICE_H

#include <stdbool.h>
#include <sys/types.h>

extern struct service {
    pid_t pid;
    bool asked, ended_unasked; /* asked to end; has ended without being asked */
    bool ending;      /* the attempt ends, and the service is signalled like all other processes */
} service;

const char *start_service(void);
void ask_service_to_end(void);
void service_ended(int status);

/* The pid that is not signalled with the rest of the process tree. */
static inline pid_t spared_service(void) { return service.ending ? 0 : service.pid; }

#endif
