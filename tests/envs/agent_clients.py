"""Agent libraries as their users would use them, each with the tool `search`: `python agent_clients.py NAME URL`.

They run in an environment of their own (`make test-agents`). The last line printed is the agent's answer.
"""

import asyncio
import os
import sys

MODEL, ASKED, KEY = "policy", "How much is it?", "sk-own"


def search(q: str) -> str:
    """Search for a text.

    Args:
        q: The text.
    """
    return f"{q} is 4"


async def openai_agents_responses(url):
    return await _openai_agents(url, "responses")


async def openai_agents_chat(url):
    return await _openai_agents(url, "chat_completions")


async def _openai_agents(url, api):
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    agents.set_default_openai_api(api)
    agents.set_default_openai_client(AsyncOpenAI(base_url=url, api_key=KEY), use_for_tracing=False)
    agent = agents.Agent(name="asks", instructions="Be brief.", model=MODEL, tools=[agents.function_tool(search)])
    return (await agents.Runner.run(agent, ASKED)).final_output


async def langgraph(url):
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model=MODEL, base_url=url, api_key=KEY)
    found = await create_react_agent(model, [search]).ainvoke({"messages": [("user", ASKED)]})
    return found["messages"][-1].content


async def pydantic_ai(url):
    import pydantic_ai
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key=KEY))
    return (await pydantic_ai.Agent(model, tools=[search], instructions="Be brief.").run(ASKED)).output


async def pydantic_ai_anthropic(url):
    import pydantic_ai
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=url, api_key=KEY))
    return (await pydantic_ai.Agent(model, tools=[search], instructions="Be brief.").run(ASKED)).output


async def smolagents(url):
    import smolagents

    model = smolagents.OpenAIServerModel(model_id=MODEL, api_base=url, api_key=KEY)
    agent = smolagents.ToolCallingAgent(tools=[smolagents.tool(search)], model=model, max_steps=4, verbosity_level=0)
    return await asyncio.to_thread(agent.run, ASKED)


async def mini_swe_agent(url):
    """Mends a repository of one file; its commands run under bubblewrap."""
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    where = {"api_base": url, "api_key": KEY}
    model = LitellmModel(model_name=f"openai/{MODEL}", model_kwargs=where, cost_tracking="ignore_errors")
    place = BubblewrapEnvironment()
    (place.working_dir / "sums.py").write_text("def add(a, b):\n    return a - b\n")
    agent = DefaultAgent(model, place, system_template="You are a programmer.", instance_template="{{ task }}")
    await asyncio.to_thread(agent.run, "add subtracts; mend it")
    return (place.working_dir / "sums.py").read_text().splitlines()[1].strip()


if __name__ == "__main__":
    os.environ |= {"NO_PROXY": "127.0.0.1", "MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    name, url = sys.argv[1:]
    answer = asyncio.run(globals()[name](url))
    sys.stdout.write(f"\n{answer}\n")
