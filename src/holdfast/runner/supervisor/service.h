/* The service: a program beside the tasks of a held spec, started and stopped by command. */
#ifndef SERVICE_H
#define SERVICE_H

#include <stdbool.h>
#include <sys/types.h>

extern struct service {
    pid_t pid;
    bool asked, fell; /* asked to end; ended without being asked */
    bool ending;      /* the attempt ends, and the service is signalled with all else */
} service;

const char *start_service(void);
void ask_service_to_end(void);
void service_ended(int status);

/* What is not signalled with the rest of the tree. */
static inline pid_t spared_service(void) { return service.ending ? 0 : service.pid; }

#endif
